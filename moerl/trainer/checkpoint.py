"""Checkpoint directories: written under a temporary name, hashed, renamed, and checked before use.

A checkpoint exists when its directory has its final name and a manifest whose hashes match every file. The newest
valid one is used; corrupt newer ones are reported and left in place. Files and folders with other names than ours in
the same folder are neither read nor removed. Torch-free: the files of a checkpoint are written by other modules, in any
number of processes. Only the main rank, rank 0, commits and removes checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from moerl.contract.files import atomic_file, remove, replace_folder, sync
from moerl.contract.sealed import FileFacts, find_change
from moerl.errors import CheckpointError
from moerl.reading import read_file

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run directory."""
MANIFEST = "manifest.json"
FORMAT = 2
MAX_MANIFEST_BYTES = 1 << 26
"""Bytes; far above the manifest of ten thousand ranks."""

_NAME = re.compile(r"(\d+)-([a-z]+)-(\d{6,})", re.ASCII)
_PARTIAL = re.compile(r"\.(.+)\.partial", re.ASCII)


class CheckpointName(NamedTuple):
    """Name of a checkpoint's directory; names sort in the order of writing."""

    order: int
    """Number of the stage in its run, from 0."""
    stage: str
    """Name of the stage, lower-case letters."""
    step: int
    """Steps that the stage has made."""

    def __str__(self) -> str:
        return f"{self.order}-{self.stage}-{self.step:06d}"


def parse_name(text: str) -> CheckpointName | None:
    """Returns the name of a checkpoint; None if `text` is none that a run would write."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    name = CheckpointName(int(match[1]), match[2], int(match[3]))
    return name if str(name) == text else None


def checkpoint_names(folder: Path) -> list[str]:
    """Returns the checkpoints in a folder, valid or not, in the order of writing; other names are left out."""
    if not folder.is_dir():
        return []
    return [str(name) for name in sorted(filter(None, (parse_name(path.name) for path in folder.iterdir())))]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A valid checkpoint."""

    path: Path
    """Its directory."""
    state: dict[str, Any]
    """State that the loop stored in the manifest."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, each with the reason, newest first."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: has one directory per checkpoint, named by `CheckpointName`.
        keep: checkpoints to keep, at least 1.
        find_state_problem: returns what is wrong with a stored state, None if it can be used.

    Attributes:
        corrupt: names of checkpoints that `latest`, or another store of the same folder, found to be corrupt: they do
            not count as kept ones.
    """

    def __init__(
        self, folder: Path, keep: int, find_state_problem: Callable[[dict[str, Any]], str | None] | None = None
    ) -> None:
        self.folder = folder
        self.keep = keep
        self._find_state_problem = find_state_problem
        self.corrupt: set[str] = set()

    def begin(self, name: str) -> Path:
        """Makes an empty directory to write into, and removes leftovers of interrupted attempts."""
        for leftover in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            match = _PARTIAL.fullmatch(leftover.name)
            if match is not None and parse_name(match[1]) is not None:
                remove(leftover)
        path = self.partial(name)
        path.mkdir(parents=True)
        return path

    def partial(self, name: str) -> Path:
        """Returns the directory of a checkpoint while it is written."""
        return self.folder / f".{name}.partial"

    def commit(self, name: str, state: dict[str, Any], files: Mapping[str, FileFacts]) -> Path:
        """Writes the manifest, renames, removes the oldest beyond `keep`.

        Args:
            files: results of `moerl.contract.sealed.describe` of all files, from the ranks that wrote them.

        Raises:
            CheckpointError: a file is there that no rank described, or the other way round.
        """
        temporary, final = self.partial(name), self.folder / name
        there = {str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()}
        if there != set(files):
            raise CheckpointError(
                f"the checkpoint {name} was not written whole",
                seen=f"files {sorted(there ^ files.keys())} either lost or unknown",
                expected=f"the {len(files)} files that the ranks wrote",
                remedy="check that every rank writes to the same file system",
            )
        manifest = temporary / MANIFEST
        content = {"format": FORMAT, "state": state, "files": msgspec.to_builtins(dict(sorted(files.items())))}
        manifest.write_text(json.dumps({**content, "blake2b": _hash_of(content)}, indent=1))
        sync(manifest)
        replace_folder(temporary, final)
        with atomic_file(self._last_written) as path:
            path.write_text(f"{name}\n")
        self.corrupt.discard(name)
        for old in [each for each in checkpoint_names(self.folder) if each not in self.corrupt][: -self.keep]:
            remove(self.folder / old)
        return final

    @property
    def _last_written(self) -> Path:
        """Path of a file next to the folder, so that a run that lost the folder can tell that it had checkpoints."""
        return self.folder.with_name("last_checkpoint.txt")

    def last_written(self) -> str | None:
        """Returns the name of the newest checkpoint that was ever written, even if it is gone; None if there was
        none."""
        if not self._last_written.is_file():
            return None
        # Any content means that the run had a checkpoint: bytes that are no text must not hide that.
        return read_file(self._last_written).decode(errors="backslashreplace").strip()

    def abandon(self, name: str) -> None:
        """Removes the files of a checkpoint that will not be committed."""
        shutil.rmtree(self.partial(name), ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """Returns the newest valid checkpoint; None if there is no checkpoint.

        Raises:
            CheckpointError: checkpoints exist and none of them is valid.
        """
        skipped: list[str] = []
        for name in reversed(checkpoint_names(self.folder)):
            problem = find_problem(self.folder / name)
            state = {} if problem else read_state(self.folder / name)
            if problem is None and self._find_state_problem is not None:
                problem = self._find_state_problem(state)
            if problem is None:
                return Checkpoint(self.folder / name, state, tuple(skipped))
            skipped.append(f"{name}: {problem}")
            self.corrupt.add(name)
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is valid",
                seen="; ".join(skipped),
                expected="at least one whose files match its manifest",
                remedy="restore a checkpoint directory from a copy, or start a new run with another run_dir",
            )
        return None


def find_problem(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint directory; None if it is valid."""
    try:
        manifest = _read_manifest(path)
        named = parse_name(path.name)
        stored = manifest["state"].get("stage"), manifest["state"].get("step")
        if named is None or stored != (named.stage, named.step):
            return f"it holds step {stored[1]} of stage {stored[0]}: a copy under another name"
        files = {name: FileFacts(facts["bytes"], facts["blake2b"]) for name, facts in manifest["files"].items()}
        return find_change(path, files)
    except _DamageError as damage:
        return str(damage)
    except OSError as error:
        return f"it cannot be read ({error})"


def read_state(path: Path) -> dict[str, Any]:
    """Returns the state that the loop stored in the manifest of a checkpoint in which `find_problem` found none."""
    return _read_manifest(path)["state"]


class _DamageError(Exception):
    """Error of a manifest that is not as it was written."""


def _read_manifest(path: Path) -> dict[str, Any]:
    """Returns the content of a manifest that matches its own hash and has this format, a state, and a list of files of
    the checkpoint with the size and hash of each. Raises `_DamageError` for any other."""
    file = path / MANIFEST
    if not file.is_file():
        raise _DamageError(f"{MANIFEST} is not a file" if file.exists() else "no manifest")
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise _DamageError(f"a manifest of {file.stat().st_size} bytes")
    try:
        manifest = json.loads(read_file(file, MAX_MANIFEST_BYTES))
        matches = isinstance(manifest, dict) and manifest.pop("blake2b", None) == _hash_of(manifest)
    except (ValueError, RecursionError) as error:
        raise _DamageError(f"unreadable manifest ({error})") from error
    if not matches:
        raise _DamageError("the manifest does not match its own hash")
    if manifest.get("format") != FORMAT:
        raise _DamageError(f"format {manifest.get('format')}, not {FORMAT}")
    for key in ("state", "files"):
        if not isinstance(manifest.get(key), dict):
            raise _DamageError(f"the manifest has no mapping {key!r}")
    for name, facts in manifest["files"].items():
        parts = PurePosixPath(name).parts
        is_inside = parts and not name.startswith("/") and ".." not in parts and "\0" not in name
        is_whole = isinstance(facts, dict) and type(facts.get("bytes")) is int and type(facts.get("blake2b")) is str
        if not is_inside or not is_whole:
            raise _DamageError(f"the manifest lists {name!r} as {facts!r:.100}")
    return manifest


def _hash_of(content: dict[str, Any]) -> str:
    """Returns the hash of a mapping as it reads back from JSON."""
    canonical = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.blake2b(canonical.encode()).hexdigest()
