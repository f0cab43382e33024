"""Rows to MLflow. Runs in the process of the tracker.

A run that goes on keeps its id. MLflow changes no parameter of a run: a key that has another value now is a tag,
``changed.<key>``.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from moerl.telemetry.trackers.tracker import Opening

_PARAMS_AT_ONCE, _LONGEST_PARAM = 100, 6000
"""Limits of MLflow: parameters in one call, and characters of one."""


class MlflowTracker:
    """Tracker that sends rows and the configuration at once: every call returns when the store has them."""

    def __init__(self) -> None:
        self._client: Any = importlib.import_module("mlflow").MlflowClient()
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._id = ""

    def open(self, opening: Opening) -> str:
        if opening.run_id is None:
            experiment = self._client.get_experiment_by_name(opening.project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(opening.project)
            self._id = str(self._client.create_run(number, run_name=opening.name).info.run_id)
        else:
            self._id = opening.run_id
            self._client.update_run(self._id, status="RUNNING")
        params, before = dict(_params(opening.config)), self._client.get_run(self._id).data.params
        new = [self._entities.Param(key, value) for key, value in params.items() if key not in before]
        for first in range(0, len(new), _PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=new[first : first + _PARAMS_AT_ONCE])
        for key, value in params.items():
            if before.get(key, value) != value:
                self._client.set_tag(self._id, f"changed.{key}", value)
        return self._id

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        row = [self._entities.Metric(f"{stage}/{name}", value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=row)

    def flush(self) -> None:
        """Does nothing: no row waits."""

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _params(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves by dotted path, in the characters and to the length that MLflow accepts."""
    for name, value in config.items():
        key = re.sub(r"[^\w.\- /:]", "_", f"{prefix}{name}")
        if isinstance(value, Mapping):
            yield from _params(value, f"{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield key, text[:_LONGEST_PARAM]
