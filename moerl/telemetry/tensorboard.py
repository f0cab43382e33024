"""Sink of metrics that writes TensorBoard events. Torch-free; runs in the controller, which alone needs TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from moerl.telemetry.metrics import STAGES, check_metrics
from moerl.telemetry.sinks import check_position, check_stage


class TensorBoardSink:
    """Sink that writes scalars and texts to one TensorBoard folder per stage under `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, RecordWriter] = {}

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        check_stage(stage)
        check_metrics(metrics)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(stage, Event(step=step, summary=Summary(value=values)))

    def write_text(self, stage: str, step: int, tag: str, text: str) -> None:
        """Writes a text, which TensorBoard reads as Markdown."""
        check_stage(stage)
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
        self._add(
            stage, Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=tensor)]))
        )

    def sync(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def truncate_after(self, stage: str, step: int, *, evaluated: bool = True) -> None:
        """Marks a restart in the events of this stage and later ones: TensorBoard hides events at its step or later."""
        check_position(stage)
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
            folder = self._directory / stage
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            seconds, nanoseconds = divmod(time.time_ns(), 10**9)
            name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
            writer = RecordWriter((folder / name).open("xb"))
            writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            self._writers[stage] = writer
        event.wall_time = time.time()
        self._writers[stage].write(event.SerializeToString())
        # At once, in this thread: TensorBoard's own writer loses the error of a full disk in another one.
        self._writers[stage].flush()
