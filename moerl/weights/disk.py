"""Weights through a shared file system, for engines in other processes: one folder for each version, whole or not
there.

Every sender writes its buckets as safetensors files; the first sender, which ends last, checks that these are the
update, adds the index and the hashes of all files, and renames the folder. Bytes go from the bucket to the file as they
lie: its layout is that of safetensors. Readers of a version check the hashes and the list of the update first. Runs in
the senders of the trainer, and in readers.

    <folder>/version-00000012/model-r000-00000.safetensors ...   tensors, by sender and bucket
                              model.safetensors.index.json       tensor -> file, as transformers and engines read it
                              hashes.json                        version, kind; file -> bytes, SHA-256
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from moerl.contract.files import atomic_file, replace_folder, sync
from moerl.contract.weight_update import Arrivals, UpdateKind, WeightUpdate, require_open, require_whole
from moerl.errors import WeightSyncError
from moerl.reading import read_file, read_json
from moerl.weights.bucket import WeightBucket

INDEX = "model.safetensors.index.json"
HASHES = "hashes.json"
KEPT_VERSIONS = 2
"""Versions that are kept: a reader of the newest one is not disturbed by the next."""
_NAMES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}
_ALIGNMENT = 8
_VERSION = re.compile(r"version-(\d+)", re.ASCII)


class _HashedFile(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _Hashes(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    kind: UpdateKind
    files: dict[str, _HashedFile]


class WrittenFile(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a file that a sender wrote."""

    num_bytes: int
    """Size of the file."""
    sha256: str
    """Hash of the file, hexadecimal."""
    names: tuple[str, ...]
    """Names of the tensors in it."""


class DiskSink:
    """A `WeightSink` that writes version folders.

    Args:
        folder: of all versions, the same on every sender.
        rank: of this sender. senders: the ranks of all; the first one ends last and makes the version whole.
    """

    def __init__(self, folder: Path, *, rank: int, senders: Sequence[int]) -> None:
        self._folder, self._rank, self._senders = folder, rank, tuple(senders)
        self._arrivals: Arrivals | None = None
        self._files: dict[str, WrittenFile] = {}

    def begin_update(self, update: WeightUpdate) -> None:
        self._arrivals, self._files = Arrivals(update), {}
        self._partial(update).mkdir(parents=True, exist_ok=True)

    def abandon_update(self) -> None:
        """Forgets the files of the update. They stay on disk, in a folder without a version's name; the next update to
        the same version writes over them."""
        self._arrivals, self._files = None, {}

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Writes one bucket to a file of its own.

        Args:
            tensors: a `WeightBucket`.

        Raises:
            WeightSyncError: as `Arrivals.check`.
        """
        assert isinstance(tensors, WeightBucket), "weights that did not come through `Publisher`"
        arrivals = require_open(self._arrivals)
        for entry in tensors.bucket.entries:
            arrivals.check(entry.name, entry.shape)
        name = f"model-r{self._rank:03}-{len(self._files):05}.safetensors"
        self._files[name] = _write(self._partial(arrivals.update) / name, tensors)
        arrivals.names.update(self._files[name].names)

    def end_update(self) -> None:
        """Lists this sender's files; the first sender completes the version. An existing folder of the version is
        replaced: a run that goes on from a checkpoint publishes its weights again.

        Raises:
            WeightSyncError: the files of all senders are not the update, or `receive` has refused a tensor.
        """
        arrivals = require_open(self._arrivals)
        arrivals.require_good()
        with atomic_file(self._listing(arrivals.update, self._rank)) as path:
            path.write_bytes(msgspec.json.encode(self._files))
        if self._rank == self._senders[0]:
            self._commit(arrivals.update)

    def _partial(self, update: WeightUpdate) -> Path:
        return self._folder / f".{version_name(update.version)}.partial"

    def _listing(self, update: WeightUpdate, rank: int) -> Path:
        return self._partial(update) / f"files-r{rank:03}.json"

    def _commit(self, update: WeightUpdate) -> None:
        partial, version = self._partial(update), update.version
        files: dict[str, WrittenFile] = {}
        for rank in self._senders:
            files |= msgspec.convert(read_json(self._listing(update, rank)), dict[str, WrittenFile])
        require_whole(update, [written.names for written in files.values()])
        for path in partial.iterdir():
            # Listings, and files of an update that never ended.
            if path.name not in files:
                path.unlink()
        weight_map = {name: file for file, written in files.items() for name in written.names}
        total = sum(written.num_bytes for written in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        hashes = {name: {"bytes": written.num_bytes, "sha256": written.sha256} for name, written in files.items()}
        _write_json(partial / INDEX, index)
        hashes[INDEX] = {"bytes": (partial / INDEX).stat().st_size, "sha256": _sha256(partial / INDEX)}
        _write_json(partial / HASHES, {"version": version, "kind": update.kind.value, "files": hashes})
        replace_folder(partial, self._folder / version_name(version))
        # Later versions are removed: the run went back to a checkpoint, and makes their steps again.
        there = versions(self._folder)
        kept = [each for each in there if each <= version][-KEPT_VERSIONS:]
        for old in set(there) - set(kept):
            shutil.rmtree(self._folder / version_name(old))


def version_name(version: int) -> str:
    """Returns the name of a version's folder."""
    return f"version-{version:08}"


def versions(folder: Path) -> list[int]:
    """Returns the whole versions of a folder, oldest first; ignores names that `version_name` does not give."""
    found = (_VERSION.fullmatch(path.name) for path in folder.glob("version-*"))
    return sorted(int(match[1]) for match in found if match and match[0] == version_name(int(match[1])))


def read_buckets(folder: Path, update: WeightUpdate) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields an update bucket by bucket, as senders wrote it, after a check of the hashes of all files and of the list
    of tensors.

    Raises:
        WeightSyncError: a file is missing, cut or changed, or the folder is of another update. Nothing was yielded.
    """
    from safetensors import safe_open

    path, arrivals = folder / version_name(update.version), Arrivals(update)
    files = [path / name for name in _check(path, update) if name.endswith(".safetensors")]
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                arrivals.check(name, handle.get_slice(name).get_shape())
                arrivals.names.add(name)
    arrivals.require_whole()
    for file in files:
        with safe_open(file, framework="pt") as handle:
            yield [(name, handle.get_tensor(name)) for name in handle.keys()]  # noqa: SIM118 - it is no mapping


def _check(path: Path, update: WeightUpdate) -> list[str]:
    """Returns the files of an update. Raises `WeightSyncError` if one is not as it was written."""
    if not (path / HASHES).is_file():
        raise _broken(path, f"no {HASHES}", "a whole version", "wait for the trainer to write it")
    try:
        listing = msgspec.json.decode(read_file(path / HASHES), type=_Hashes)
    except msgspec.DecodeError as error:
        raise _broken(path, f"{HASHES}: {error}", "the list of files", "write the version again") from error
    if (listing.version, listing.kind) != (update.version, update.kind):
        seen, expected = (f"version {each.version}, kind {each.kind.value}" for each in (listing, update))
        raise _broken(path, seen, expected, "do not rename version folders")
    for name, expected in listing.files.items():
        file = path / name
        seen = _HashedFile(file.stat().st_size, _sha256(file)) if file.is_file() else "missing"
        if seen != expected:
            raise _broken(file, seen, expected, "the file changed after it was written; write the version again")
    return list(listing.files)


def _broken(path: Path, seen: object, expected: object, remedy: str) -> WeightSyncError:
    return WeightSyncError(f"weights on disk: {path}", seen=seen, expected=expected, remedy=remedy)


# --- files -----------------------------------------------------------------------------------------------------------


def _write(path: Path, bucket: WeightBucket) -> WrittenFile:
    """Writes and syncs a safetensors file, and hashes its bytes."""
    header: dict[str, object] = {}
    for entry, (name, tensor) in zip(bucket.bucket.entries, bucket, strict=True):
        span = [entry.offset, entry.offset + entry.num_bytes]
        header[name] = {"dtype": _NAMES[str(tensor.dtype)], "shape": list(entry.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    parts = (len(text).to_bytes(8, "little"), text, memoryview(bucket.flat.cpu().numpy()))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    sync(path)
    return WrittenFile(sum(len(part) for part in parts), digest.hexdigest(), tuple(header))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    sync(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
