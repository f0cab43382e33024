"""Rows to Weights & Biases. Runs in the process of the tracker.

A run that goes on keeps its id. Offline, each process of it writes a folder of its own; `wandb sync` sends them all to
one run.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from typing import Any

from moerl.telemetry.metrics import STAGES
from moerl.telemetry.trackers.tracker import Opening

_FLUSH_SECONDS = 1.0
"""Seconds of rows that W&B's own process may lose if it alone is killed; W&B's default is 15."""


class WandbTracker:
    """Tracker that sends rows and the configuration alone: no output, no code, no figures of the machine, no list of
    packages."""

    def __init__(self) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None

    def open(self, opening: Opening) -> str:
        settings = self._wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FLUSH_SECONDS,
        )
        self._run = self._wandb.init(
            project=opening.project,
            name=opening.name,
            id=opening.run_id or uuid.uuid4().hex[:12],
            resume="allow",
            settings=settings,
        )
        # Not in `init`: a run that goes on may have other values.
        self._run.config.update(dict(opening.config), allow_val_change=True)
        for stage in STAGES:
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        return str(self._run.id)

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        row = {f"{stage}/{name}": value for name, value in metrics.items()}
        self._run.log({**row, f"{stage}/step": step})

    def flush(self) -> None:
        # An answer of wandb's own process, which works in order: it has taken all that was sent before.
        dict(self._run.summary)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
        self._wandb.teardown()
