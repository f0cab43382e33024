"""A tracker as a sink of metrics: starts its process and sends it rows. Torch-free; runs in the controller."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moerl.processes.channel import receive, send
from moerl.processes.child import Child, module_program
from moerl.reading import read_text
from moerl.telemetry.metrics import check_metrics
from moerl.telemetry.trackers.tracker import Opening

TRACKERS = ("wandb", "mlflow", "trackio")
RESUMED = "resumed"
"""A metric of 1 at the step that a run went on from: rows of later steps that come twice were made twice."""
RUN_ID_FILE = "run_id"
START_SECONDS, ANSWER_SECONDS, CLOSE_SECONDS, END_SECONDS = 300.0, 60.0, 120.0, 2.0
"""Seconds that a tracker may take for its start, for the rows so far, and for its end, before it counts as failed; and
that its process then has to end before it is killed."""
_GONE = "its process has ended"


class TrackerError(Exception):
    """Failure of a tracker: it failed, ended or is silent; it gets no more rows."""


class TrackerSink:
    """Sink that sends rows to a tracker in a process of its own.

    Every method raises `TrackerError` if the tracker has failed; a row that fails is an error of a later call.

    Args:
        name: one of `TRACKERS`.
        folder: folder of the tracker in the run directory: its log, the id of its run, and files of its own.
        opening: facts without an id; a run that goes on is found by the id in `folder`.
        environment: variables of the process.
        answer_seconds: seconds that the tracker may take to store the rows so far.

    Attributes:
        is_new: True if the tracker begins a run, so that it has no rows of this run.
        log: file for the output of its process.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        opening: Opening,
        environment: Mapping[str, str],
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.name, self.log = name, folder / "process.log"
        self._answer_seconds = answer_seconds
        self._id_file = folder / RUN_ID_FILE
        self.is_new = not self._id_file.exists()
        if not self.is_new:
            opening = replace(opening, run_id=read_text(self._id_file).strip())
        self._child = Child(module_program("moerl.telemetry.trackers.process", name), self.log, environment)
        self._socket = self._child.socket
        self._opening: Opening | None = opening

    @property
    def pid(self) -> int:
        return self._child.pid

    def open(self) -> None:
        """Returns when the tracker accepts rows; the id of its run is stored by then."""
        assert self._opening is not None
        answer = self._ask({"do": "open", "opening": asdict(self._opening)}, START_SECONDS)
        self._opening = None
        partial = self._id_file.with_suffix(".partial")
        partial.write_text(answer["run_id"] + "\n", encoding="utf-8")
        partial.replace(self._id_file)

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        check_metrics(metrics)
        self._write(stage, step, metrics)

    def sync(self) -> None:
        self._ask({"do": "flush"}, self._answer_seconds)

    def truncate_after(self, stage: str, step: int, *, evaluated: bool = True) -> None:
        """Marks the step from which the run goes on: no tracker drops single rows, so later rows come twice."""
        self._write(stage, step, {RESUMED: 1.0})

    def close(self, *, failed: bool = False, seconds: float = CLOSE_SECONDS) -> None:
        """Ends the tracker's run and its process, within `seconds`. failed: True if an error ends the run."""
        try:
            if self._opening is None:
                self._ask({"do": "close", "failed": failed}, seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Ends the process, without closing the tracker's run."""
        self._socket.close()
        if self._opening is not None:
            self._child.kill()
        self._child.wait(END_SECONDS)

    def _write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        if select.select([self._socket], [], [], 0.0)[0]:  # nothing is due: an error, or the end of the process
            self._receive()
        self._send({"do": "write", "stage": stage, "step": step, "metrics": dict(metrics)}, self._answer_seconds)

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        self._send(message, seconds)
        self._socket.settimeout(max(0.1, seconds - (time.monotonic() - began)))
        return self._receive()

    def _send(self, message: dict[str, Any], seconds: float) -> None:
        self._socket.settimeout(seconds)
        try:
            send(self._socket, json.dumps(message).encode())
        except TimeoutError as error:
            raise self._silent() from error
        except OSError as error:
            # An error that it sent before it ended tells more.
            self._socket.settimeout(1.0)
            self._receive()
            raise TrackerError(_GONE) from error

    def _receive(self) -> dict[str, Any]:
        try:
            answer = json.loads(receive(self._socket)[0])
        except TimeoutError as error:
            raise self._silent() from error
        except (EOFError, OSError, ValueError) as error:
            raise TrackerError(_GONE) from error
        if "error" in answer:
            raise TrackerError(answer["error"])
        return answer

    def _silent(self) -> TrackerError:
        return TrackerError(f"no answer within {self._socket.gettimeout() or 0.0:.3g} s")
