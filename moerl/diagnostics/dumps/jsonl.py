"""JSON lines of strangers, one at a time: memory is bounded by the longest line that is accepted. Any process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from moerl.diagnostics.dumps.rollout import Unusable
from moerl.diagnostics.dumps.values import shown
from moerl.errors import ConfigError
from moerl.reading import open_regular, read_file

MAX_LINE_BYTES = 256 << 20
"""Longest line, and largest JSON file without lines; decoded it takes some ten times as much."""

TOO_LONG, NOT_JSON, NO_OBJECT = "line too long", "not JSON", "not a JSON object"

type Row = dict[str, Any]


def rows(file: Path, unusable: Unusable) -> Iterator[tuple[str, Row]]:
    """Yields the objects of a JSON lines file, or of a JSON file that is one object or a list of them, with their
    place.

    Entries that are no objects are counted. NaN and Infinity, which JSON does not know and Python writes, are read as
    such.
    """
    with open_regular(file) as stream:
        start = stream.read(4096).lstrip()[:1]
        stream.seek(0)
        found = _listed(file, stream) if start == b"[" else _lines(file, stream, unusable)
        for where, value in found:
            if isinstance(value, dict):
                yield where, value
            else:
                unusable.add(NO_OBJECT, f"{where}: {shown(value)}")


def _lines(file: Path, stream: BinaryIO, unusable: Unusable) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{file.name} line {number}"
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(1 << 20)
            unusable.add(TOO_LONG, f"{where}: more than {MAX_LINE_BYTES} bytes")
        elif line.strip():
            try:
                value = decode(line)
            except ValueError as error:
                if number == 1 and (whole := _whole(file)) is not None:
                    yield file.name, whole
                    return
                unusable.add(NOT_JSON, f"{where}: {error}")
            else:
                yield where, value


def _listed(file: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    if file.stat().st_size > MAX_LINE_BYTES:
        raise ConfigError(
            f"DUMP: {file} is one JSON list",
            seen=f"{file.stat().st_size} bytes",
            expected=f"at most {MAX_LINE_BYTES} bytes",
            remedy="write one JSON object a line",
        )
    try:
        values = decode(stream.read(MAX_LINE_BYTES + 1))
    except ValueError as error:
        raise ConfigError(
            f"DUMP: {file} is no JSON", seen=error, expected="a list of objects", remedy="copy or write the file again"
        ) from error
    for index, value in enumerate(values):
        yield f"{file.name} entry {index}", value


def _whole(file: Path) -> Any:
    """Returns the one value of a JSON file of several lines; None if the file is something else."""
    if file.stat().st_size > MAX_LINE_BYTES:
        return None
    try:
        return decode(read_file(file, MAX_LINE_BYTES))
    except ValueError:
        return None


def decode(data: bytes) -> Any:
    """Returns one JSON value. Raises `ValueError`, also for one that is nested too deep."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at byte {error.pos}") from error
