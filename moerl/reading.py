"""Reading of files that somebody else may have made: regular files alone, of a limited size, and JSON of limited depth.
Any process; imports nothing of moerl.

A pipe or a device in the place of a file would keep a run waiting without a word. `tests/unit/test_reading.py` lists
the modules that open files by themselves, with the reason.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 64 << 20
"""Largest file, in bytes. The largest of real models, the index of a model of 700 B parameters, has 9 MB."""

MAX_DEPTH = 64
"""Lists and objects in one another, the outermost counted. Real documents have ten; some libraries fail at 300."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read its bytes. Raises `OSError` if there is none, or it is no regular file."""
    # Without O_NONBLOCK a pipe keeps us waiting here for a writer; a regular file takes no notice of it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        kind = _kind(os.fstat(descriptor))
        if kind:
            raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a regular file. Raises `OSError`, or `ValueError` if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Returns the text of a file in UTF-8. Raises as `read_file` does, and `ValueError` for other bytes."""
    return read_file(path, max_bytes).decode()


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Returns the value of a JSON file. Raises as `read_file` does, and `ValueError` if it is no JSON, or is nested too
    deep."""
    try:
        value = json.loads(read_file(path, max_bytes))
    except RecursionError as error:
        raise ValueError(f"more than {MAX_DEPTH} lists and objects in one another") from error
    check_depth(value)
    return value


def check_depth(value: object, depth: int = MAX_DEPTH) -> None:
    """Raises `ValueError` if lists and objects are nested too deep."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(f"more than {MAX_DEPTH} lists and objects in one another")
        for each in value.values() if isinstance(value, dict) else value:
            check_depth(each, depth - 1)


def find_irregular(folder: Path) -> str | None:
    """Finds a pipe, device or socket, for which a library that reads the folder would wait, in it and one level below:
    returns its path and kind, or None. Raises `OSError` if the folder cannot be read."""
    for inner in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        for path in sorted(inner.iterdir()):
            # A link to nothing is for the library to miss.
            if path.exists() and not path.is_dir() and (kind := _kind(path.stat())):
                return f"{path}: {kind}"
    return None


def _kind(status: os.stat_result) -> str:
    """Returns the kind of a file, for people; an empty text for a regular file."""
    return "" if stat.S_ISREG(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
