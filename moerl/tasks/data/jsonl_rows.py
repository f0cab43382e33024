"""The rows of a JSON-lines file, read strictly: errors name the number of the line. Runs in the controller."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from moerl.errors import ConfigError
from moerl.reading import check_depth, open_regular
from moerl.telemetry.terminal import excerpt

MAX_LINE_BYTES = 1 << 24
"""Longest line of a file of rows, and the most that a column of a row of any other format may take as JSON."""


def read_rows(path: Path, key: str = "task.path") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of a JSON-lines file with their line numbers, from 1.

    Args:
        key: key of the configuration, for errors.

    Raises:
        ConfigError: The file cannot be read, or a line is no JSON object.
    """
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise bad_line(key, path, number, "a longer line", f"at most {MAX_LINE_BYTES:,} bytes")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, _read_row(key, path, number, line)
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot read {path}",
            seen=error.strerror,
            expected="a readable JSON-lines file",
            remedy="check the path and its permissions",
        ) from error


def _read_row(key: str, path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(
            line.decode(), object_pairs_hook=_unrepeated, parse_float=_finite, parse_constant=_refuse_constant
        )
        check_depth(row)
        # Escapes can spell half a surrogate pair, which no tokenizer and no later file takes.
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise bad_line(key, path, number, excerpt(str(error)), "a JSON object in UTF-8") from error
    if not isinstance(row, dict):
        raise bad_line(key, path, number, f"a JSON {type(row).__name__}", "a JSON object")
    return row


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} twice in one object")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the numbers of float64")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def bad_line(key: str, path: Path, number: int, seen: str, expected: str) -> ConfigError:
    """Returns the error for a line of a file."""
    return ConfigError(
        f"{key}: bad line {path}:{number}", seen=seen, expected=expected, remedy="correct or remove the line"
    )
