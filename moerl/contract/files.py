"""Files and folders that appear whole or not at all: temporary name, fsync, rename. Any process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it to `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:64]}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_folder(parent: Path, name: str, contents: Mapping[str, bytes]) -> Path:
    """A new folder `parent/name` holding `contents`, by file name; `name-2`, `name-3`... where it is taken.

    The folder appears with all its files or not at all, and never replaces another, whoever else writes here.
    """
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=parent))
    try:
        for file_name, data in contents.items():
            file = temporary / file_name
            file.write_bytes(data)
            sync(file)
        sync(temporary)
        final = _rename_to_free_name(temporary, parent, name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(parent)
    return final


def _rename_to_free_name(temporary: Path, parent: Path, name: str) -> Path:
    attempt = 1
    while True:
        final = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            # Fails on a folder with content, so of two writers of one name the second moves on.
            os.rename(temporary, final)
        except OSError:
            if not final.exists():
                raise
            attempt += 1
        else:
            return final


def sync(path: Path) -> None:
    """Writes a file or a directory entry through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
