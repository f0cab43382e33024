"""Finished groups on disk until a checkpoint holds what became of them: a crash loses what was being sampled, not this.

Append-only segments, one for each time between two checkpoints. A record is a prefix with the lengths, a header
(MessagePack) and a frame of trajectories, each with a checksum. What a crash tore off at the end of a segment is left
out; damage elsewhere is an error. Runs in the controller.

    <folder>/000012.journal    records since the checkpoint after step 12
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from moerl.contract.files import writing
from moerl.contract.trajectory import ModelSpec, Trajectory
from moerl.contract.wire import decode_trajectories, encode_trajectories
from moerl.errors import ContractError, MoerlError
from moerl.reading import open_regular

_PREFIX = struct.Struct("<4sIIQ")
_CRC = struct.Struct("<I")
_MAGIC = b"GRUP"


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    refused: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class FinishedGroup:
    """A group whose rollouts have all ended: trajectories with their rewards; reasons of the others, by rollout id."""

    number: int
    trajectories: Sequence[Trajectory]
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def newest_version(self) -> int:
        """Of any token; -1 where every rollout was refused."""
        return max((int(t.policy_versions.max()) for t in self.trajectories), default=-1)


class Journal:
    """Writes finished groups, gives them back, and forgets those that no checkpoint needs.

    Args:
        folder: of the segments; made with the first record.
        spec: of the model; records of another are refused.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder, self._spec = folder, spec
        self._file: BinaryIO | None = None
        self._step = 0
        self._numbers: dict[Path, set[int]] = {}

    def begin(self, step: int) -> None:
        """Records go into the segment of this step from now on."""
        self.close()
        self._step = step

    def append(self, group: FinishedGroup) -> None:
        """Hands a group to the system: it outlives this process.

        Raises:
            MoerlError: the file system refused.
        """
        path = self._folder / f"{self._step:06d}.journal"
        header = msgspec.msgpack.encode(_Header(group.number, dict(group.refused)))
        frame = encode_trajectories(group.trajectories)
        prefix = _PREFIX.pack(_MAGIC, zlib.crc32(header), len(header), len(frame))
        with writing(path):
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = path.open("ab")
            self._file.write(prefix + _CRC.pack(zlib.crc32(prefix)) + header + frame)
            self._file.flush()
        self._numbers.setdefault(path, set()).add(group.number)

    def read(self) -> dict[int, FinishedGroup]:
        """All groups that are there, by number; of one that is there twice, the latest.

        Raises:
            MoerlError: a segment is damaged.
        """
        found: dict[int, FinishedGroup] = {}
        for path in sorted(self._folder.glob("*.journal")):
            for group in self._read(path):
                found[group.number] = group
                self._numbers.setdefault(path, set()).add(group.number)
        return found

    def forget(self, needed: Collection[int], first_new: int) -> None:
        """Removes segments without a group that a checkpoint may ask for.

        Args:
            needed: numbers of groups that were not trained by the checkpoint. first_new: of the first that was not
                dispatched by then.
        """
        for path, numbers in list(self._numbers.items()):
            is_open = self._file is not None and path.name == f"{self._step:06d}.journal"
            if not is_open and not any(number in needed or number >= first_new for number in numbers):
                with writing(path):
                    path.unlink(missing_ok=True)
                del self._numbers[path]

    def clear(self) -> None:
        """Removes all segments: of a run that starts over."""
        self.close()
        for path in self._folder.glob("*.journal"):
            path.unlink()
        self._numbers = {}

    def close(self) -> None:
        """Ends the segment."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path) -> Iterator[FinishedGroup]:
        with open_regular(path) as file:
            data = file.read()
        at = 0
        while at < len(data):
            start = at + _PREFIX.size + _CRC.size
            if len(data) < start:
                return
            magic, header_crc, header_bytes, frame_bytes = _PREFIX.unpack_from(data, at)
            (prefix_crc,) = _CRC.unpack_from(data, at + _PREFIX.size)
            if magic != _MAGIC or prefix_crc != zlib.crc32(data[at : at + _PREFIX.size]):
                raise _damaged(path, f"no record at byte {at}")
            end = start + header_bytes + frame_bytes
            if len(data) < end:
                return
            header = data[start : start + header_bytes]
            if header_crc != zlib.crc32(header):
                raise _damaged(path, f"the header at byte {at}")
            try:
                told = msgspec.msgpack.decode(header, type=_Header)
                trajectories = decode_trajectories(data[start + header_bytes : end], spec=self._spec)
            except (msgspec.MsgspecError, ContractError) as error:
                raise _damaged(path, f"the record at byte {at}: {error}") from error
            yield FinishedGroup(told.number, trajectories, told.refused)
            at = end


def _damaged(path: Path, seen: str) -> MoerlError:
    return MoerlError(
        f"the journal {path} is damaged",
        seen=seen,
        expected="finished groups as this run wrote them",
        remedy="restore the file from a copy, or remove it: its groups are then sampled again",
    )
