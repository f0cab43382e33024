"""Decisions of the RL loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factories import make_trajectory
from policy_rows import preset

from moerl.contract.batch import BatchTotals, TrainSample
from moerl.contract.trainer import ROW_COLUMNS, PassReport
from moerl.contract.trajectory import Lineage
from moerl.orchestration.batches import Minibatch
from moerl.orchestration.rl import is_selected, penalised_advantages


@pytest.mark.parametrize(
    ("verify", "proved"),
    [("every", [1, 2, 3, 4, 5, 6]), ("off", []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])],
)
def test_updates_are_proved_every_time_every_nth_or_never(verify: str | int, proved: list[int]):
    assert [update for update in range(1, 7) if is_selected(verify, update)] == proved


def test_a_kl_in_the_reward_is_summed_over_each_rollout_wherever_its_rows_were_computed() -> None:
    """Two groups of two, one in each minibatch; rows come in the order of ranks."""
    made = make_trajectory(np.random.default_rng(0))
    rewards, kl = [1.0, 0.0, 0.5, 2.0], [[0.3, 0.1], [0.4], [0.0, 0.2, 0.2], [1.0]]
    minibatches, reports = [], []
    for first in (0, 2):
        samples = []
        for i in (first, first + 1):
            lineage = Lineage(f"r{i}", f"p{first}", f"g{first}")
            trajectory = replace(made, lineage=lineage, rewards={"reward": rewards[i]})
            samples.append(TrainSample(trajectory, np.zeros(len(trajectory), np.float32)))
        minibatches.append(Minibatch([], BatchTotals(1.0, 1.0), {}, samples))
        table = [(value, place) for place in (1, 0) for value in kl[first + place]]
        rows_RC = np.zeros((len(table), len(ROW_COLUMNS)), np.float32)
        rows_RC[:, ROW_COLUMNS.index("kl")] = [value for value, _ in table]
        rows_RC[:, ROW_COLUMNS.index("sample")] = [place for _, place in table]
        none = np.zeros(0, np.int64)
        reports.append(PassReport(rows_RC, 0.0, 0, none, np.zeros(0), none))
    found = penalised_advantages(minibatches, reports, preset("rloo", kl_coef=0.5, kl_in="reward"))
    lessened = [reward - 0.5 * sum(values) for reward, values in zip(rewards, kl, strict=True)]
    expected = [
        [lessened[0] - lessened[1], lessened[1] - lessened[0]],
        [lessened[2] - lessened[3], lessened[3] - lessened[2]],
    ]
    assert [part.tolist() for part in found] == [pytest.approx(part) for part in expected]
