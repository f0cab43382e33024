"""Finished groups on disk until a checkpoint holds their outcome: a crash loses groups in sampling, but not these; nor
turns of episodes that can be played again.

Append-only segments, one for each time between two checkpoints. A record is a prefix with the lengths, a header
(MessagePack) and a frame of trajectories, each with a checksum. A full disk or a crash tears the last record of a
segment: some of its bytes, or NUL bytes in their place, are all that is there. The torn record is left out, and cut
off before anything is written behind it. Damage elsewhere is an error. Runs in the controller.

    <folder>/000012.journal    records since the checkpoint after step 12
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moerl.buffer.turns import KeptTurn
from moerl.contract.files import cut_back, reading, write_all, writing
from moerl.contract.frame import is_whole
from moerl.contract.trajectory import ModelSpec, Trajectory
from moerl.contract.wire import decode_trajectories, encode_trajectories
from moerl.errors import ContractError, MoerlError, undoing
from moerl.reading import open_regular

_PREFIX = struct.Struct("<4sIIQ")
_CRC = struct.Struct("<I")
_PREFIX_BYTES = _PREFIX.size + _CRC.size
_MAGIC = b"GRUP"


class _TurnHeader(msgspec.Struct, forbid_unknown_fields=True):
    prompt_checksum: int
    num_known: int


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    refused: dict[str, str]
    filtered: dict[str, str] = {}
    turn: _TurnHeader | None = None
    """Set if the record is a turn of an episode that has not ended."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A whole record of a segment: its first byte, the byte behind it, and its parts."""

    start: int
    end: int
    header: bytes
    frame: bytes


@dataclass(frozen=True, slots=True, eq=False)
class FinishedGroup:
    """A group whose rollouts have all ended."""

    number: int
    """Number of the group, in the order of dispatch."""
    trajectories: Sequence[Trajectory]
    """Admitted trajectories with their rewards, in the order of the requests; those of an episode are together."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons of the rollouts that were refused, by rollout id."""
    filtered: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons of the rollouts that are not trained on as the configuration says, by rollout id."""

    @property
    def newest_version(self) -> int:
        """Largest version of any token; -1 if none was admitted."""
        return max((int(t.policy_versions.max()) for t in self.trajectories), default=-1)


class Journal:
    """Writer and reader of finished groups, which forgets those that no checkpoint needs.

    Args:
        folder: folder of the segments; made with the first record.
        spec: model facts; records of another model are refused.

    Attributes:
        torn_bytes: bytes of unfinished records that the latest `read` left out.
        turns: turns that the latest `read` found of groups that have not ended, in the order in which they were kept;
            none once a segment is begun.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder, self._spec = folder, spec
        self._file: int | None = None
        self._step = 0
        self._numbers: dict[Path, set[int]] = {}
        self.torn_bytes = 0
        self.turns: list[KeptTurn] = []

    def begin(self, step: int) -> None:
        """Begins the segment of this step: later records go there."""
        self.close()
        self.turns = []
        self._step = step

    def append(self, group: FinishedGroup) -> None:
        """Hands a group to the operating system: the group outlives this process.

        Raises:
            MoerlError: the file system refused, or the segment is damaged.
        """
        header = _Header(group.number, dict(group.refused), dict(group.filtered))
        self._append(header, group.trajectories)

    def append_turn(self, turn: KeptTurn) -> None:
        """Hands a turn to the operating system, as `append` does."""
        told = _TurnHeader(turn.prompt_checksum, turn.num_known)
        self._append(_Header(turn.number, {}, {}, told), [turn.tokens])

    def _append(self, told: _Header, trajectories: Sequence[Trajectory]) -> None:
        path, header = self._path, msgspec.msgpack.encode(told)
        frame = encode_trajectories(trajectories)
        prefix = _PREFIX.pack(_MAGIC, zlib.crc32(header), len(header), len(frame))
        with writing(path):
            if self._file is None:
                self._file = self._open(path)
            try:
                write_all(self._file, prefix + _CRC.pack(zlib.crc32(prefix)) + header + frame)
            except OSError:
                # A part of the record may be there: the next `_open` of the segment cuts it off.
                with contextlib.suppress(MoerlError):  # the first error tells more
                    self.close()
                raise
        self._numbers.setdefault(path, set()).add(told.number)

    def read(self) -> dict[int, FinishedGroup]:
        """Returns all groups that are there, by number; the latest record of a group that is there twice. Turns
        that are there, of other groups, are in `turns`.

        Raises:
            MoerlError: a segment is damaged or cannot be read.
        """
        found: dict[int, FinishedGroup] = {}
        self.torn_bytes, self.turns = 0, []
        for path in sorted(self._folder.glob("*.journal")):
            with reading(path), open_regular(path) as file:
                data = file.read()
            num_whole = 0
            for record in _records(path, data):
                kept = self._kept(path, record)
                if isinstance(kept, FinishedGroup):
                    found[kept.number] = kept
                else:
                    self.turns.append(kept)
                self._numbers.setdefault(path, set()).add(kept.number)
                num_whole += record.end - record.start
            self.torn_bytes += len(data) - num_whole
        self.turns = [turn for turn in self.turns if turn.number not in found]
        return found

    def forget(self, needed: Collection[int], first_new: int) -> None:
        """Removes segments without a group that a checkpoint may ask for.

        Args:
            needed: numbers of groups that were not trained by the checkpoint. first_new: number of the first group that
                was not dispatched by then.
        """
        for path, numbers in list(self._numbers.items()):
            is_open = self._file is not None and path == self._path
            if not is_open and not any(number in needed or number >= first_new for number in numbers):
                with writing(path):
                    path.unlink(missing_ok=True)
                del self._numbers[path]

    def clear(self) -> None:
        """Removes all segments: a run starts over, or its last checkpoint is on disk."""
        self.close()
        for path in self._folder.glob("*.journal"):
            with writing(path):
                path.unlink()
        self._numbers = {}

    def close(self) -> None:
        """Ends the segment. Raises `MoerlError` if the file system refuses only now, as a network file system may."""
        file, self._file = self._file, None
        if file is not None:
            with writing(self._path):
                os.close(file)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._step:06d}.journal"

    def _open(self, path: Path) -> int:
        """Opens a segment behind its last whole record; bytes of an unfinished record there are gone from the disk
        before another is written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with undoing(lambda: os.close(file)):
            with open_regular(path) as reader:
                data = reader.read()
            end = max((record.end for record in _records(path, data)), default=0)
            cut_back(file, len(data), end)
        return file

    def _kept(self, path: Path, record: _Record) -> FinishedGroup | KeptTurn:
        try:
            told = msgspec.msgpack.decode(record.header, type=_Header)
            trajectories = decode_trajectories(record.frame, spec=self._spec)
        except (msgspec.MsgspecError, ContractError) as error:
            raise _damaged(path, f"the record at byte {record.start}: {error}") from error
        if told.turn is not None:
            (tokens,) = trajectories
            return KeptTurn(told.number, told.turn.prompt_checksum, told.turn.num_known, tokens)
        return FinishedGroup(told.number, trajectories, told.refused, told.filtered)


def _records(path: Path, data: bytes) -> Iterator[_Record]:
    """Yields the whole records of a segment, in order.

    A record that is not whole is torn if its bytes end too early: at the end of the data, in NUL bytes up to there, or
    at the next record, because earlier versions of moerl wrote behind torn records. Any other is damaged. A flipped bit
    changes none of these places, unless it is in the last record and that ends in a NUL byte.

    Raises:
        MoerlError: a record is damaged.
    """
    at, num_written = 0, len(data.rstrip(b"\0"))
    while at < len(data):
        lengths = _lengths(data, at)
        end = at + _PREFIX_BYTES + sum(lengths or ())
        record = _whole(data, at, lengths) if lengths and end <= len(data) else None
        if record is not None:
            yield record
            at = end
        elif (behind := _next_prefix(data, at + 1, end)) is not None:
            at = behind
        elif num_written < end:
            return
        else:
            raise _damaged(path, f"no whole record at byte {at}")


def _lengths(data: bytes, at: int) -> tuple[int, int] | None:
    """Returns bytes of header and frame of the record that begins at `at`; None if there is no prefix."""
    if len(data) < at + _PREFIX_BYTES:
        return None
    magic, _, header_bytes, frame_bytes = _PREFIX.unpack_from(data, at)
    (crc,) = _CRC.unpack_from(data, at + _PREFIX.size)
    if magic != _MAGIC or crc != zlib.crc32(data[at : at + _PREFIX.size]):
        return None
    return header_bytes, frame_bytes


def _whole(data: bytes, at: int, lengths: tuple[int, int]) -> _Record | None:
    """Returns the record of these lengths; None if a checksum does not match."""
    (header_bytes, frame_bytes), start = lengths, at + _PREFIX_BYTES
    middle, end = start + header_bytes, start + header_bytes + frame_bytes
    header, frame = data[start:middle], data[middle:end]
    _, header_crc, _, _ = _PREFIX.unpack_from(data, at)
    return _Record(at, end, header, frame) if header_crc == zlib.crc32(header) and is_whole(frame) else None


def _next_prefix(data: bytes, start: int, end: int) -> int | None:
    """Returns the byte of this range at which the next record begins; None if none does."""
    until = end + len(_MAGIC) - 1
    at = data.find(_MAGIC, start, until)
    while at >= 0 and _lengths(data, at) is None:
        at = data.find(_MAGIC, at + 1, until)
    return at if at >= 0 else None


def _damaged(path: Path, seen: str) -> MoerlError:
    return MoerlError(
        f"the journal {path} is damaged",
        seen=seen,
        expected="finished groups as this run wrote them",
        remedy="restore the file from a copy, or remove it: its groups are then sampled again",
    )
