"""Rows in the trackers' own files, read back with their own libraries: alone, and of a run that is killed and goes on.

The libraries are no part of the locked environment, and without them these tests are left out. To run them, make an
environment by ``make setup`` in another clone and add ``pip install -e ".[wandb,mlflow,trackio]"``, which takes an
older pillow for trackio. No network is needed: everything is offline.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from moerl_runs import Runs
from tracker_readers import PROJECT, stored
from waiting import is_alive

from moerl.config.trackers import LIBRARIES, check_trackers, tracker_environment
from moerl.errors import ConfigError
from moerl.telemetry.trackers.sink import TrackerSink
from moerl.telemetry.trackers.tracker import Opening

pytestmark = pytest.mark.slow


def need(*names: str) -> None:
    try:
        check_trackers(names)
    except ConfigError as error:
        pytest.skip(str(error))


def make_sink(name: str, run: Path) -> TrackerSink:
    folder = run / name
    opening = Opening(PROJECT, run.name, {"seed": 1, "rl": {"steps": 4}})
    return TrackerSink(name, folder, opening, tracker_environment(name, folder))


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_tracker_keeps_every_row_of_a_run_that_goes_on_under_one_id(name: str, tmp_path: Path) -> None:
    need(name)
    run, folder = tmp_path / "a run: 100%", tmp_path / "a run: 100%" / name
    sink = make_sink(name, run)
    sink.open()
    sink.write("sft", 1, {"sft/loss": 2.5})
    for step in (1, 2, 3):
        sink.write("rl", step, {"reward/mean": step / 8, "optimizer/lr": 1e-05})
        sink.sync()
    sink.close(failed=True)
    assert not is_alive(sink.pid)
    sink = make_sink(name, run)
    sink.open()
    sink.truncate_after("rl", 2)
    sink.write("rl", 3, {"reward/mean": 0.75})
    sink.write("evaluation", 3, {"accuracy/mean": 0.5})
    sink.close()
    assert not is_alive(sink.pid)
    found = stored(name, folder)
    rewards = [(step, value) for key, step, value in found["points"] if key == "rl/reward/mean"]
    assert rewards == [(1, 0.125), (2, 0.25), (3, 0.375), (3, 0.75)]
    points = [tuple(point) for point in found["points"]]
    assert {("sft/sft/loss", 1, 2.5), ("rl/resumed", 2, 1.0), ("evaluation/accuracy/mean", 3, 0.5)} <= set(points)
    assert {value for key, _, value in points if key == "rl/optimizer/lr"} == {1e-05}
    assert set(found["runs"]) == {(folder / "run_id").read_text().strip()}


def test_a_run_that_is_killed_and_goes_on_has_in_each_tracker_what_metrics_jsonl_has(
    forked: Runs, tmp_path: Path
) -> None:
    need(*LIBRARIES)
    run = tmp_path / "run"
    sinks = f"metrics.sinks=[jsonl,tensorboard,{','.join(LIBRARIES)}]"
    keys = ["rl.steps=5", "checkpoint.every=2", "evaluation.every=2", sinks]
    kill = ("kill", {"place": "moerl.orchestration.run:Run.log", "call": 7, "after": True})
    killed = forked.run("train", "recipe=tiny", f"run_dir={run}", *keys, fault=kill)
    assert killed.status == -signal.SIGKILL, killed.output
    finished = forked.run("train", f"resume={run}", "evaluation.heldout_problems=7")
    assert finished.status == 0, finished.output
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = {
        (f"{row['stage']}/{name}", row["step"]): value
        for row in rows
        for name, value in row.items()
        if name not in ("stage", "step")
    }
    for name in LIBRARIES:
        found = stored(name, run / name)
        latest = {(key, step): value for key, step, value in found["points"]}
        assert {place: latest.get(place) for place in expected} == expected, name
        assert len(set(found["runs"])) == 1
    assert stored("mlflow", run / "mlflow")["tags"] == {"changed.evaluation.heldout_problems": "7"}
