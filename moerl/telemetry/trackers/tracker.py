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
    """Facts that a tracker gets first."""

    project: str
    """Name of the project that the run belongs to (`metrics.project`)."""
    name: str
    """Name of the run: that of its directory."""
    config: Mapping[str, Any]
    """Resolved configuration without secrets, plain data."""
    run_id: str | None = None
    """Id that the tracker gave an earlier process of this run; None begins a new run."""


class Tracker(Protocol):
    """Tracker of one library, which gets rows. Any error of a method ends the tracker."""

    def open(self, opening: Opening) -> str:
        """Begins a run, or goes on with one; returns its id."""
        ...

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one row: metrics are named ``<stage>/<metric>``, and each stage counts its own steps."""

    def flush(self) -> None:
        """Returns when the library has stored every row. Raises an error if it has lost one."""

    def close(self, *, failed: bool) -> None:
        """Ends the run. failed: True if an error ends it."""
