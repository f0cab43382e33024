"""Samples that cannot be packed: each is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factories import GREEDY, SPEC, make_trajectory
from packing_samples import sample, text

from moerl.batching.packing import PackOptions, pack_for_ranks, pack_text_for_ranks, pack_trajectories
from moerl.batching.rows import Padding
from moerl.contract.batch import TextSample, TrainSample
from moerl.contract.reasons import Reason
from moerl.errors import ConfigError, ContractError, ReplayError


def test_a_row_without_captured_routing_is_refused():
    lost = sample(8, "rollout-x", unrouted=(1, 2))
    with pytest.raises(ReplayError, match=r"rollout rollout-x .*seen: 2 of 7 rows without captured routing"):
        pack_trajectories([lost], PackOptions(64, Padding(total=1)), replay=True)


def test_greedy_tokens_are_refused():
    with pytest.raises(ContractError, match="greedy tokens in rollout rollout-0") as caught:
        pack_trajectories([sample(8, sampling=GREEDY)], PackOptions(64, Padding(total=1)), replay=False)
    assert caught.value.reason == Reason.SAMPLING_INVALID


@pytest.mark.parametrize(
    ("advantages", "reason"),
    [
        (np.ones(7, np.float32), Reason.WRONG_SHAPE),
        (np.ones(8, np.float64), Reason.WRONG_SHAPE),
        (np.full(8, np.nan, np.float32), Reason.VALUE_NOT_FINITE),
    ],
)
def test_advantages_that_do_not_fit_are_refused(advantages: np.ndarray, reason: Reason):
    bad = replace(sample(8), advantages=advantages)
    with pytest.raises(ContractError, match="rollout rollout-0") as caught:
        pack_trajectories([bad], PackOptions(64, Padding(total=1)), replay=False)
    assert caught.value.reason == reason


@pytest.mark.parametrize("budget", [8, 64])
def test_two_samples_of_one_rollout_are_refused(budget: int):
    """Their rows have the same salts, so their routes could change places under one checksum."""
    twice = [sample(rollout_id="a"), sample(9, rollout_id="b"), sample(rollout_id="a")]
    with pytest.raises(ContractError, match="samples 0 and 2 are both of rollout 'a'") as caught:
        pack_for_ranks(twice, 2, PackOptions(budget), replay=True)
    assert caught.value.reason == Reason.ROLLOUT_DUPLICATE


def test_trajectories_of_two_models_are_refused():
    other = make_trajectory(np.random.default_rng(0), replace(SPEC, fingerprint="other"), num_sampled=5)
    with pytest.raises(ContractError, match="one model in a batch"):
        pack_trajectories(
            [sample(8), TrainSample(other, np.zeros(8, np.float32))], PackOptions(64, Padding(total=1)), replay=True
        )


def test_a_budget_below_one_padded_row_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.microbatch_tokens"):
        pack_trajectories([sample(8)], PackOptions(7, Padding(total=8)), replay=False)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (text(1), Reason.TOO_SHORT),
        (TextSample(np.zeros(3, np.int32), np.zeros(2, np.bool_)), Reason.WRONG_SHAPE),
        (TextSample(np.zeros(3, np.int32), np.ones(3, np.bool_)), Reason.FIRST_TOKEN_SAMPLED),
    ],
)
def test_a_supervised_sequence_that_cannot_be_shifted_is_refused(bad: TextSample, reason: Reason):
    with pytest.raises(ContractError) as caught:
        pack_text_for_ranks([text(5), bad], 1, PackOptions(64, Padding(total=1)))
    assert caught.value.reason == reason
