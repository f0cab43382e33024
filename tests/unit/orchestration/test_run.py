"""What a run does about updates that the optimizer skipped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from factories import make_trajectory, same_trajectory

from moerl.contract.batch import TrainSample
from moerl.contract.disk import read_parquet
from moerl.errors import MoerlError
from moerl.orchestration.run import Run
from moerl.trainer.optimizer import UpdateReport


class FakeRun:
    """As much of a run as a skipped update needs: two may be skipped in a row."""

    def __init__(self, run_dir: Path) -> None:
        self.config = SimpleNamespace(run_dir=run_dir, trainer=SimpleNamespace(max_skipped_updates=2))
        self.reporter = SimpleNamespace(say=self._say)
        self.said: list[str] = []

    def _say(self, text: str) -> None:
        self.said.append(text)

    def check(self, update: UpdateReport, name: str, samples: list[TrainSample]) -> None:
        Run.check_update(cast(Any, self), update, name, samples)


def skipped(in_a_row: int) -> UpdateReport:
    return UpdateReport(0.0, 1e-3, skipped=True, skipped_in_a_row=in_a_row)


def samples() -> list[TrainSample]:
    rng = np.random.default_rng(0)
    trajectories = [make_trajectory(rng, rollout_id=f"rollout-{i}") for i in range(3)]
    return [TrainSample(trajectory, np.zeros(len(trajectory), np.float32)) for trajectory in trajectories]


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


def test_a_rank_without_samples_writes_nothing(tmp_path: Path) -> None:
    FakeRun(tmp_path).check(skipped(1), "sft-000007", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_samples", [True, False], ids=["main rank", "another rank"])
def test_one_more_than_the_allowed_skipped_updates_in_a_row_stops_every_rank(has_samples: bool, tmp_path: Path) -> None:
    run, batch = FakeRun(tmp_path), samples() if has_samples else []
    for count in (1, 2):
        run.check(skipped(count), f"rl-00000{count}-0", batch)
    with pytest.raises(MoerlError, match="the gradient is not finite") as caught:
        run.check(skipped(3), "rl-000003-0", batch)
    assert "3 skipped updates in a row" in str(caught.value)
    assert "max_skipped_updates = 2" in str(caught.value)
    assert (tmp_path / "skipped" / "rl-000003-0.parquet").exists() == has_samples
