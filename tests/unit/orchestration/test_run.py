"""Reaction of a run to updates that the optimizer skipped, and stored states with which a run can go on."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from factories import make_trajectory, same_trajectory

from moerl.config.load import CONFIG_FILE, dump_config, load_config
from moerl.contract.batch import TrainSample
from moerl.contract.disk import read_parquet
from moerl.contract.trainer import UpdateReport
from moerl.errors import MoerlError
from moerl.orchestration.run import Run
from moerl.orchestration.run_state import RunState, find_state_problem


class FakeRun:
    """Parts of a run that a skipped update needs: two updates may be skipped in a row."""

    def __init__(self, run_dir: Path) -> None:
        self.config = SimpleNamespace(run_dir=run_dir, trainer=SimpleNamespace(max_skipped_updates=2))
        self.reporter = SimpleNamespace(notify=self._notify)
        self.said: list[str] = []

    def _notify(self, text: str) -> None:
        self.said.append(text)

    def check(self, update: UpdateReport, name: str, samples: list[TrainSample]) -> None:
        Run.check_update(cast(Any, self), update, name, samples)


def skipped(in_a_row: int) -> UpdateReport:
    return UpdateReport(0.0, 1e-3, skipped=True, skipped_in_a_row=in_a_row)


def samples() -> list[TrainSample]:
    rng = np.random.default_rng(0)
    trajectories = [make_trajectory(rng, rollout_id=f"rollout-{i}") for i in range(3)]
    return [TrainSample(trajectory, np.zeros(len(trajectory), np.float32)) for trajectory in trajectories]


def test_seconds_of_a_run_are_those_of_all_its_processes() -> None:
    run = SimpleNamespace(state=SimpleNamespace(wall_seconds=100.0), started=time.monotonic() - 10.0)
    assert 110.0 <= cast(property, Run.wall_seconds).__get__(run) < 200.0


def test_an_applied_update_leaves_nothing_behind(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.check(UpdateReport(1.0, 1e-3), "rl-000001-0", samples())
    assert run.said == []
    assert list(tmp_path.iterdir()) == []


def test_the_batch_of_a_skipped_update_is_kept_whole(tmp_path: Path) -> None:
    run, batch = FakeRun(tmp_path), samples()
    run.check(skipped(1), "rl-000007-1", batch)
    kept = read_parquet(tmp_path / "skipped" / "rl-000007-1.parquet")
    for sample, trajectory in zip(batch, kept, strict=True):
        assert same_trajectory(sample.trajectory, trajectory)
    assert "update skipped (1 in a row, 2 allowed)" in run.said[0]
    assert "rl-000007-1.parquet" in run.said[0]


def test_a_skipped_update_without_samples_writes_nothing(tmp_path: Path) -> None:
    FakeRun(tmp_path).check(skipped(1), "sft-000007", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_samples", [True, False], ids=["reinforcement learning", "supervised"])
def test_one_more_than_the_allowed_skipped_updates_in_a_row_stops_the_run(has_samples: bool, tmp_path: Path) -> None:
    run, batch = FakeRun(tmp_path), samples() if has_samples else []
    for count in (1, 2):
        run.check(skipped(count), f"rl-00000{count}-0", batch)
    with pytest.raises(MoerlError, match="the gradient is not finite") as caught:
        run.check(skipped(3), "rl-000003-0", batch)
    assert "3 skipped updates in a row" in str(caught.value)
    assert "max_skipped_updates = 2" in str(caught.value)
    assert (tmp_path / "skipped" / "rl-000003-0.parquet").exists() == has_samples


def stored(**changes: Any) -> dict[str, Any]:
    run = RunState(tokens_trained=7, wall_seconds=1.5, quarantine={"admitted": 3}, mismatch={"both": {"kl": 0.5}})
    return json.loads(json.dumps({"stage": "rl", "step": 4, "run": asdict(run) | changes}))


def test_a_stored_state_can_be_gone_on_with() -> None:
    assert find_state_problem(stored()) is None
    old = stored()
    del old["run"]["mismatch_first"]
    assert find_state_problem(old) is None


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({}, "no stage of a run: None"),
        (stored() | {"stage": "dpo"}, "no stage of a run: 'dpo'"),
        (stored() | {"run": None}, "its run state is not one: Expected `object`, got `null`"),
        ({"stage": "rl", "step": 4}, "its run state is not one: Expected `object`, got `null`"),
        (stored() | {"run": [1]}, "its run state is not one: Expected `object`, got `array`"),
        (stored(tokens_trained="7"), "its run state is not one: Expected `int`, got `str` - at `$.tokens_trained`"),
        (stored(quarantine={"admitted": [3]}), "its run state is not one: Expected `int`, got `array`"),
        (stored(mismatch={"both": 0.5}), "its run state is not one: Expected `object`, got `float`"),
        (stored(of_the_future=1), "its run state has unknown keys: of_the_future"),
    ],
)
def test_a_state_that_is_not_one_of_a_run_is_named(state: dict[str, Any], problem: str) -> None:
    found = find_state_problem(state)
    assert found is not None
    assert found.startswith(problem)


@pytest.mark.parametrize(("every_before", "every_now", "has_lost_some"), [(50, 5, False), (5, 50, True), (0, 5, False)])
def test_lost_checkpoints_are_those_that_the_run_was_to_write_before_it_was_changed(
    every_before: int, every_now: int, has_lost_some: bool, tmp_path: Path
) -> None:
    keys = ["recipe=tiny", f"run_dir='{tmp_path}'"]
    before, now = (
        load_config([*keys, f"checkpoint.every={every}"], command="train") for every in (every_before, every_now)
    )
    (tmp_path / CONFIG_FILE).write_text(dump_config(before))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"stage": "sft", "step": step}) + "\n" for step in range(1, 41))
    )
    run = SimpleNamespace(config=now, _store=SimpleNamespace(last_written=lambda: None))
    assert bool(Run._trace_of_a_checkpoint(cast(Run, run))) == has_lost_some
