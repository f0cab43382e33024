"""Stands for W&B in the process of a tracker: keeps what it is told as lines of JSON in `WANDB_DIR`, fails as asked.

FAKE_FAILURE: ``open`` (init raises), ``3:raise``, ``3:die`` or ``3:hang`` at that row.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_FILE = Path(os.environ["WANDB_DIR"]) / "told.jsonl"
_WHEN, _, _HOW = os.environ.get("FAKE_FAILURE", "").partition(":")


def _tell(**what: Any) -> None:
    with _FILE.open("a") as file:
        file.write(json.dumps(what) + "\n")


class Settings:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class _Config:
    def update(self, values: dict[str, Any], *, allow_val_change: bool) -> None:
        _tell(config=values)


class _Run:
    def __init__(self, run_id: str) -> None:
        self.id, self.config, self._rows = run_id, _Config(), 0

    @property
    def summary(self) -> dict[str, Any]:
        return {}

    def define_metric(self, name: str, **how: Any) -> None:
        pass

    def log(self, row: dict[str, float]) -> None:
        self._rows += 1
        if str(self._rows) == _WHEN:
            if _HOW == "die":
                os._exit(9)
            if _HOW == "hang":
                time.sleep(600)
            raise OSError("No space left on device")
        _tell(row=row)

    def finish(self, *, exit_code: int) -> None:
        _tell(finished=exit_code)


def init(**settings: Any) -> _Run:
    if _WHEN == "open":
        raise RuntimeError("no such project")
    _tell(begun=settings["id"], mode=os.environ["WANDB_MODE"])
    return _Run(settings["id"])


def teardown() -> None:
    pass
