"""Sinks of metrics: `metrics.jsonl` and TensorBoard events. Torch-free; runs in the controller.

Rows are appended in the order in which they happen: the cold start, then reinforcement learning with evaluations in
between. Going on from a checkpoint first drops every row after it, so that a file never tells a step twice.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from moerl.reading import open_regular
from moerl.telemetry.metrics import STAGES, check_metrics

METRICS_FILE, LAYERS_FILE = "metrics.jsonl", "layers.jsonl"
"""In a run directory."""


class MetricSink(Protocol):
    """Takes rows of metrics."""

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one row. Raises `ValueError` for a stage or metric that is not registered."""
        ...

    def sync(self) -> None:
        """Returns when every row is on disk; called before a checkpoint counts as saved."""
        ...

    def truncate_after(self, stage: str, step: int, *, evaluated: bool = True) -> None:
        """Drops what happened after `step` of `stage` (sft or rl); without `evaluated`, its evaluation too."""
        ...

    def close(self) -> None: ...


def is_kept(row_stage: str, row_step: int, stage: str, step: int) -> bool:
    """True where a row did not happen after `step` of `stage` (sft or rl).

    An evaluation with step n belongs to the rl steps up to n, those at n included: evaluate before you save.
    """
    if stage == "sft":
        return row_stage == "sft" and row_step <= step
    return row_stage == "sft" or row_step <= step


class JsonlSink:
    """Appends rows to a JSONL file, each flushed at once.

    Args:
        path: made with the first row; rows that are there are kept.
        check: refuses what has no place in this file; `check_metrics` or `check_layer_metrics`.

    Attributes:
        torn_bytes: of a last line without an end, left by a kill in mid-write and dropped.

    Raises:
        ValueError: A whole line of the file is not a row of metrics.
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
        _check_stage(stage)
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
        _check_position(stage)
        self.close()
        if not self._path.exists():
            return
        last_evaluation = step if evaluated else step - 1
        kept = [
            row
            for row in read_rows(self._path)
            if is_kept(row["stage"], row["step"], stage, last_evaluation if row["stage"] == "evaluation" else step)
        ]
        self._rewrite(kept)

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
    """The rows of a metrics file. A last line without an end, left by a kill in mid-write, is not a row.

    Raises:
        ValueError: A whole line is not a row of metrics.
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


class TensorBoardSink:
    """Writes scalars to one TensorBoard folder per stage under `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, RecordWriter] = {}

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        _check_stage(stage)
        check_metrics(metrics)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(stage, Event(step=step, summary=Summary(value=values)))

    def write_text(self, stage: str, step: int, tag: str, text: str) -> None:
        """Writes a text, which TensorBoard reads as Markdown."""
        _check_stage(stage)
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
        self._add(
            stage, Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=tensor)]))
        )

    def sync(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def truncate_after(self, stage: str, step: int, *, evaluated: bool = True) -> None:
        """Marks a restart in every stage's events: TensorBoard then hides what is at or after its step."""
        _check_position(stage)
        for name in STAGES:
            if not (self._directory / name).is_dir() or (stage == "rl" and name == "sft"):
                continue
            first_dropped = step + 1 if name == stage or (stage, name) == ("rl", "evaluation") else 0
            if name == "evaluation" and not evaluated:
                first_dropped = max(0, first_dropped - 1)
            self._add(name, Event(step=first_dropped, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add(self, stage: str, event: Event) -> None:
        if stage not in self._writers:
            self._writers[stage] = self._open(stage)
        event.wall_time = time.time()
        self._writers[stage].write(event.SerializeToString())
        # At once, in this thread: TensorBoard's own writer loses the error of a full disk in another one.
        self._writers[stage].flush()

    def _open(self, stage: str) -> RecordWriter:
        folder = self._directory / stage
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        writer = RecordWriter((folder / name).open("xb"))
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        return writer


def _check_stage(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is not one of {STAGES}")


def _check_position(stage: str) -> None:
    if stage not in ("sft", "rl"):
        raise ValueError(f"cannot go back to stage {stage!r}; expected sft or rl")
