"""Trackers for tests, on a library that stands for W&B: ``from fake_sinks import make_sink, told``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moerl.telemetry.trackers.sink import TrackerSink
from moerl.telemetry.trackers.tracker import Opening

FAKES = Path(__file__).parent / "fake_trackers"
OPENING = Opening("moerl", "a-run", {"seed": 1, "rl": {"steps": 4}})


def make_sink(folder: Path, failure: str = "", opening: Opening = OPENING, answer_seconds: float = 60.0) -> TrackerSink:
    """A sink whose process is started; failure: as in `fake_trackers/wandb.py`."""
    path = os.pathsep.join([str(FAKES), os.environ.get("PYTHONPATH", "")])
    fake = {"PYTHONPATH": path, "WANDB_DIR": str(folder), "WANDB_MODE": "offline", "FAKE_FAILURE": failure}
    return TrackerSink("wandb", folder, opening, {**os.environ, **fake}, answer_seconds)


def told(folder: Path, kind: str = "row") -> list[Any]:
    """Returns the messages of one kind that the fake library received."""
    lines = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]
