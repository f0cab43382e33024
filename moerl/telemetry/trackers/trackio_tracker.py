"""Rows to trackio. Runs in the process of the tracker.

trackio finds a run that goes on by its name; its id says that it is the same one.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

from moerl.telemetry.trackers.tracker import Opening


class TrackioTracker:
    """Tracker that sends rows and the configuration alone. trackio only warns of a row that it loses; here that is an
    error."""

    def __init__(self) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._opening = Opening("", "", {})
        self._run: Any = None
        self._has_rows = False
        self._warning = ""
        warnings.showwarning = self._take_warning

    def open(self, opening: Opening) -> str:
        self._opening = opening
        self._begin(opening.run_id)
        return str(self._run.id)

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({f"{stage}/{name}": value for name, value in metrics.items()}, step=step)
        self._has_rows = True
        self._check()

    def flush(self) -> None:
        """Ends the run and goes on with it: trackio waits for its rows in no other way."""
        if self._has_rows:
            self._end()
            self._begin(self._run.id)

    def close(self, *, failed: bool) -> None:
        self._end()

    def _begin(self, run_id: str | None) -> None:
        self._run = self._trackio.init(
            project=self._opening.project,
            name=self._opening.name,
            config=dict(self._opening.config),
            resume="never" if run_id is None else "must",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._has_rows = False
        self._check()
        if run_id is not None and self._run.id != run_id:
            raise RuntimeError(
                f"the latest run of the name {self._opening.name!r} in project {self._opening.project!r} is another one"
                f" ({self._run.id}, not {run_id}); give each run directory a name of its own"
            )

    def _end(self) -> None:
        self._run.finish()
        self._check()

    def _take_warning(self, message: Warning | str, category: type[Warning], *rest: object, **others: object) -> None:
        text = str(message)
        if "trackio" in text.lower() or "flush" in text.lower():
            self._warning = self._warning or text
        print(f"{category.__name__}: {text}", flush=True)

    def _check(self) -> None:
        if self._warning:
            raise RuntimeError(self._warning)
