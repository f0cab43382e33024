"""Port of a tracker, for the process that runs it. Torch-free.

A library of a tracker brings threads, processes, exit handlers and requests of its own, and some of them drop rows
without an error. Each runs in a process of its own (`moerl.telemetry.trackers.process`), which says what fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Opening:
    """Facts that a tracker gets first.

    project: that the run belongs to. name: of the run. config: the resolved configuration, plain data.
    run_id: id that the tracker gave an earlier process of this run; None begins a new run.
    """

    project: str
    name: str
    config: Mapping[str, Any]
    run_id: str | None = None


class Tracker(Protocol):
    """Takes rows for one library. Whatever a method raises ends the tracker."""

    def open(self, opening: Opening) -> str:
        """Begins a run, or goes on with one; its id."""
        ...

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one row: metrics are named ``<stage>/<metric>``, and each stage counts its own steps."""
        ...

    def flush(self) -> None:
        """Returns when the library has taken every row. Raises where it has lost one."""
        ...

    def close(self, *, failed: bool) -> None:
        """Ends the run; failed: by an error."""
        ...
