"""Disks that fail: full ones, and those that lose power."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `room_bytes`: a write takes what fits, and the next one is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class PowerLoss:
    """Record of what a file system could lose of renamed files if the power failed at any moment, from the calls of
    `os.fsync`, `os.rename` and `os.replace`.

    Attributes:
        renamed: final names in the order in which files and directories got them.
    """

    def __init__(self) -> None:
        self.renamed: list[Path] = []
        self._on_disk: dict[tuple[int, int], object] = {}
        self._lost: list[str] = []

    def fsync(self, file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        self._on_disk[_key(os.fstat(number))] = _content(Path(os.readlink(f"/proc/self/fd/{number}")))

    def rename(self, source: Any, target: Any) -> None:
        for path in [Path(source), *Path(source).rglob("*")]:
            if not self._is_on_disk(path):
                self._lost.append(f"{path.relative_to(Path(source).parent)} as it got its name")
        self.renamed.append(Path(target))

    def lost(self) -> list[str]:
        """At the end, names included."""
        parents = dict.fromkeys(path.parent for path in self.renamed if path.exists())
        return [*self._lost, *(f"names in {path}" for path in parents if not self._is_on_disk(path))]

    def _is_on_disk(self, path: Path) -> bool:
        return self._on_disk.get(_key(path.stat())) == _content(path)


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _content(path: Path) -> object:
    """Returns what `fsync` writes: the bytes of a file, the names in a directory."""
    return frozenset(os.listdir(path)) if path.is_dir() else path.read_bytes()


@contextmanager
def power_may_go() -> Iterator[PowerLoss]:
    """Watches what the block writes."""
    disk = PowerLoss()

    def watched(name: str, watch: Any) -> Any:
        original = getattr(os, name)
        return mock.patch.object(os, name, lambda *args, **kwargs: (watch(*args), original(*args, **kwargs))[1])

    with watched("fsync", disk.fsync), watched("rename", disk.rename), watched("replace", disk.rename):
        yield disk
