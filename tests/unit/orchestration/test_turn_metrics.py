"""Metrics of the turns of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import tiny_moe
import torch
from factories import FULL, Layout, make_from_layout, make_trajectory

from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.shares import cut_share
from moerl.contract.trainer import RowTable
from moerl.contract.trajectory import TURN_REWARDS, Lineage, Trajectory, TurnKind
from moerl.orchestration.turn_metrics import turn_metrics
from moerl.ranks.tables import local_rows
from moerl.telemetry.metrics import NUM_TURNS, check_metrics
from moerl.trainer.trainer import RowScores

RNG = np.random.default_rng(0)


def rows_of(trajectories: Sequence[Trajectory]) -> RowTable:
    """Rows of the sampled tokens of trajectories, with a gap of an eighth of the position."""
    pairs = [(n, p) for n, each in enumerate(trajectories) for p in np.flatnonzero(each.sampled).tolist()]
    sample, position = np.array(RNG.permutation(pairs), np.float32).T
    rollout = RNG.normal(size=len(pairs)).astype(np.float32)
    others = {name: np.zeros_like(rollout) for name in ("full", "entropy", "clipped", "weight", "kl")}
    differing = np.float32(1) * (position % 2 == 0)
    trainer = rollout - position / 8
    return RowTable(
        sample=sample, position=position, trainer=trainer, rollout=rollout, layers_differing=differing, **others
    )


def turns(*sizes: int, name: str = "a", parent: str = "", fork_at: int = -1) -> Trajectory:
    """Sampled turns of these sizes behind a prompt of 4 tokens, with 2 observed ones between them."""
    parts = [(TurnKind.PROMPT, 4, None)]
    for size in sizes:
        parts += [(TurnKind.SAMPLED, size, FULL), (TurnKind.OBSERVATION, 2, None)]
    lineage = Lineage(name, "p", "g", "e", "", parent, fork_at)
    return make_from_layout(RNG, Layout(tuple(parts[:-1])), lineage=lineage)


def test_single_responses_have_no_metrics_of_turns() -> None:
    trajectories = [make_trajectory(RNG, num_sampled=4)]
    assert turn_metrics([(trajectories, rows_of(trajectories))]) == {}


def test_each_turn_has_the_gap_and_the_experts_of_its_own_tokens_in_whatever_order_rows_come() -> None:
    trajectories = [turns(2, 3, name="a"), turns(1, name="b")]
    found = turn_metrics([(trajectories, rows_of(trajectories))])
    # Positions: a has 4, 5 and 8, 9, 10; b has 4.
    assert found == {
        "turn/1/sessions": 2.0,
        "turn/1/tokens_mean": 1.5,
        "turn/1/logprob_abs_mean": pytest.approx((4 + 5 + 4) / 3 / 8),
        "turn/1/tokens_with_different_experts": pytest.approx(2 / 3),
        "turn/2/sessions": 1.0,
        "turn/2/tokens_mean": 3.0,
        "turn/2/logprob_abs_mean": pytest.approx(9 / 8),
        "turn/2/tokens_with_different_experts": pytest.approx(2 / 3),
    }
    check_metrics(found)


def test_several_updates_add_up_and_each_has_trajectories_of_its_own() -> None:
    first, second = [turns(2, 3)], [turns(1), turns(4, 1)]
    parts = [(each, rows_of(each)) for each in (first, second)]
    together = [*first, *second]
    assert turn_metrics(parts) == pytest.approx(turn_metrics([(together, rows_of(together))]))


def test_what_turns_earned_is_a_mean_over_the_sessions_that_have_the_turn() -> None:
    trajectory = turns(2, 2)
    earned_S = np.zeros(len(trajectory), np.float32)
    earned_S[[turn.end - 1 for turn in trajectory.sampled_turns]] = [0.5, 0.25]
    trajectories = [replace(trajectory, scores={TURN_REWARDS: earned_S}), turns(1)]
    found = turn_metrics([(trajectories, rows_of(trajectories))])
    assert (found["turn/1/reward_mean"], found["turn/2/reward_mean"]) == (0.25, 0.25)
    check_metrics(found)


def test_turns_of_a_fork_go_on_from_those_of_its_parent() -> None:
    parent = turns(2, 2, name="a")
    fork = turns(3, name="a~1", parent="a", fork_at=parent.sampled_turns[1].end)
    found = turn_metrics([([parent, fork], rows_of([parent, fork]))])
    assert found["turn/3/tokens_mean"] == 3.0
    assert found["turn/1/sessions"] == 1.0


def test_turns_behind_the_last_that_is_reported_are_left_out() -> None:
    trajectories = [turns(*[1] * (NUM_TURNS + 2))]
    found = turn_metrics([(trajectories, rows_of(trajectories))])
    assert f"turn/{NUM_TURNS}/sessions" in found
    check_metrics(found)
    assert len({name.split("/")[1] for name in found}) == NUM_TURNS


def test_rows_of_all_ranks_name_the_positions_of_trained_tokens() -> None:
    samples = tiny_moe.make_samples(3, (9, 20))
    (whole,) = tiny_moe.pack(samples, multiple=8, sequence=8)[0]
    tables = []
    for context_rank in (0, 1):
        layout = RankCoordinates(ParallelDims(context=2), context_rank)
        share = cut_share(whole, layout)
        scores = RowScores(torch.from_numpy(share.rollout_logprobs), torch.zeros(share.num_rows))
        tables.append(local_rows(layout, [share], [scores]))
    table = RowTable.of(np.concatenate(tables))
    for number, sample in enumerate(samples):
        of_sample = table.sample == number
        order = np.argsort(table.position[of_sample])
        trajectory = sample.trajectory
        assert table.position[of_sample][order].tolist() == np.flatnonzero(trajectory.sampled).tolist()
        np.testing.assert_array_equal(table.rollout[of_sample][order], trajectory.rollout_logprobs[trajectory.sampled])
