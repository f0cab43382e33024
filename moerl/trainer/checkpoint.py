"""Checkpoint directories: written under a temporary name, hashed, renamed, and checked before use.

A checkpoint exists when its directory has its final name and a manifest whose hashes match every file. The newest
valid one is used; a corrupt newer one is named loudly and left where it is. Standard library only: what goes into a
checkpoint is the business of those who write the files, in as many processes as they like. The store itself is the
main rank's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
HASHING_THREADS = 8
"""Files that are read side by side; hashing lets other threads run."""

Facts = dict[str, dict[str, Any]]
"""Of files, by their path inside the checkpoint: `bytes` and `blake2b`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A valid checkpoint. state: what the loop stored in the manifest. skipped: newer ones that were corrupt."""

    path: Path
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: holds one directory per checkpoint; names sort in the order of writing.
        keep: how many to keep, at least 1.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._corrupt: set[str] = set()

    def begin(self, name: str) -> Path:
        """An empty directory to write into; leftovers of interrupted attempts are removed."""
        for leftover in self.folder.glob(".*.partial"):
            shutil.rmtree(leftover)
        path = self.partial(name)
        path.mkdir(parents=True)
        return path

    def partial(self, name: str) -> Path:
        """Where a checkpoint lies while it is written."""
        return self.folder / f".{name}.partial"

    def commit(self, name: str, state: dict[str, Any], files: Mapping[str, Any]) -> Path:
        """Writes the manifest, renames, removes the oldest beyond `keep`.

        Checkpoints that `latest` found to be corrupt do not count as kept ones.

        Args:
            files: what `describe` said of every file, by those who wrote them.

        Raises:
            CheckpointError: a file is there that nobody described, or the other way round.
        """
        temporary, final = self.partial(name), self.folder / name
        there = {str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()}
        if there != files.keys():
            raise CheckpointError(
                f"the checkpoint {name} was not written whole",
                seen=f"files {sorted(there ^ files.keys())} either lost or unknown",
                expected=f"the {len(files)} files that the ranks wrote",
                remedy="check that every rank writes to the same file system",
            )
        manifest = temporary / MANIFEST
        content = {"format": FORMAT, "state": state, "files": dict(sorted(files.items()))}
        manifest.write_text(json.dumps({**content, "blake2b": _hash_of(content)}, indent=1))
        _sync(manifest)
        _sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(self.folder)
        self._corrupt.discard(name)
        for old in [each for each in self.names() if each not in self._corrupt][: -self.keep]:
            shutil.rmtree(self.folder / old)
        return final

    def abandon(self, name: str) -> None:
        """Removes what was written of a checkpoint that will not be committed."""
        shutil.rmtree(self.partial(name), ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """The newest valid checkpoint; None where none was ever written.

        Raises:
            CheckpointError: checkpoints exist and none of them is valid.
        """
        skipped: list[str] = []
        for name in reversed(self.names()):
            problem = find_problem(self.folder / name)
            if problem is None:
                return Checkpoint(self.folder / name, read_state(self.folder / name), tuple(skipped))
            skipped.append(f"{name}: {problem}")
            self._corrupt.add(name)
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is valid",
                seen="; ".join(skipped),
                expected="at least one whose files match its manifest",
                remedy="restore a checkpoint directory from a copy, or start a new run with another run_dir",
            )
        return None

    def names(self) -> list[str]:
        """Of every checkpoint, valid or not, in the order of writing."""
        if not self.folder.exists():
            return []
        return sorted(p.name for p in self.folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def find_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint directory; None where it is valid."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return "no manifest"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"unreadable manifest ({error})"
    if not isinstance(manifest, dict) or manifest.pop("blake2b", None) != _hash_of(manifest):
        return "the manifest does not match its own hash"
    if manifest["format"] != FORMAT:
        return f"format {manifest['format']}, not {FORMAT}"
    files = manifest["files"]
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {facts['bytes']}"
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        for (name, facts), found in zip(files.items(), pool.map(_hash, (path / name for name in files)), strict=True):
            if found != facts["blake2b"]:
                return f"{name} does not match its hash"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """What the loop stored in the manifest of a checkpoint in which `find_problem` found none."""
    return json.loads((path / MANIFEST).read_text())["state"]


def describe(folder: Path, files: Iterable[Path]) -> Facts:
    """Syncs files of a checkpoint and hashes them. Called by those who wrote them, so that nobody reads them all."""
    facts = {}
    for path in files:
        _sync(path)
        facts[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "blake2b": _hash(path)}
    return facts


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def _hash_of(content: dict[str, Any]) -> str:
    """Hash of a mapping as it reads back from JSON."""
    canonical = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.blake2b(canonical.encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
