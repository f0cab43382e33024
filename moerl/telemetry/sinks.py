"""Sinks of metrics: a port, and `metrics.jsonl`. Torch-free; sinks run in the controller, readers anywhere.

Rows are appended in the order in which they happen: the cold start, then reinforcement learning with evaluations in
between. Going on from a checkpoint first drops every row after it, so that a file never tells a step twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from moerl.reading import open_regular
from moerl.telemetry.metrics import STAGES, check_metrics

METRICS_FILE, LAYERS_FILE = "metrics.jsonl", "layers.jsonl"
"""Files in a run directory."""


class MetricSink(Protocol):
    """Sink of rows of metrics."""

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one row. Raises `ValueError` for a stage or metric that is not registered."""

    def sync(self) -> None:
        """Returns when every row is on disk; called before a checkpoint counts as saved."""

    def truncate_after(self, stage: str, step: int, *, evaluated: bool = True) -> None:
        """Drops the rows after `step` of `stage` (sft or rl); without `evaluated`, that of its evaluation, too."""

    def close(self) -> None: ...


class JsonlSink:
    """Sink that appends rows to a JSONL file, each flushed at once.

    Args:
        path: file; made with the first row, rows that are there are kept.
        check: refuses metrics that do not belong into this file: `check_metrics` or `check_layer_metrics`.

    Attributes:
        torn_bytes: bytes of a last line without an end, left by a kill in mid-write and dropped.

    Raises:
        ValueError: a whole line of the file is not a row of metrics.
    """

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], None] = check_metrics) -> None:
        self._path, self._check = path, check
        self._file: TextIO | None = None
        self.torn_bytes = 0
        if path.exists():
            with open_regular(path) as file:
                self.torn_bytes = len(file.read().rpartition(b"\n")[2])
            self._rewrite(read_rows(path))

    def write(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        check_stage(stage)
        self._check(metrics)
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps({"stage": stage, "step": step, **metrics}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate_after(self, stage: str, step: int, *, evaluated: bool = True) -> None:
        check_position(stage)
        self.close()
        if not self._path.exists():
            return
        # An evaluation with step n belongs to the rl steps up to n, those at n included: evaluate before you save.
        last = {"sft": math.inf, "rl": step, "evaluation": step if evaluated else step - 1}
        if stage == "sft":
            last = {"sft": step, "rl": -math.inf, "evaluation": -math.inf}
        self._rewrite([row for row in read_rows(self._path) if row["step"] <= last[row["stage"]]])

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.flush()
                os.fsync(file.fileno())

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replaces the file atomically."""
        partial = self._path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a metrics file. A last line without an end, left by a kill in mid-write, is not a row.

    Raises:
        ValueError: a whole line is not a row of metrics.
    """
    rows = []
    with open_regular(path) as file:
        *lines, _torn = file.read().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON; expected a row of metrics") from error
        if not isinstance(row, dict) or row.get("stage") not in STAGES or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number}: no stage and step; expected a row of metrics")
        rows.append(row)
    return rows


class RowTail:
    """Reader of a metrics file that another process writes. A run that goes on drops rows and writes the file anew.

    Attributes:
        rows: all rows at the last `poll`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.rows: list[dict[str, Any]] = []

    def poll(self) -> bool:
        """Reads the file again if it has changed; returns True if rows came or went.

        Raises:
            ValueError: a whole line is no row.
        """
        try:
            status = os.stat(self._path)
            found = (status.st_ino, status.st_size, status.st_mtime_ns)
            if found == self._seen:
                return False
            rows = read_rows(self._path)
        except FileNotFoundError:
            return False
        self._seen, changed = found, rows != self.rows
        self.rows = rows
        return changed


def check_stage(stage: str) -> None:
    """Raises `ValueError` for a stage that is not registered."""
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is not one of {STAGES}")


def check_position(stage: str) -> None:
    """Raises `ValueError` for a stage without checkpoints, to which no run goes back."""
    if stage not in ("sft", "rl"):
        raise ValueError(f"cannot go back to stage {stage!r}; expected sft or rl")
