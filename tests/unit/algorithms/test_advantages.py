"""Advantages relative to the group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.algorithms.advantages import group_advantages
from moerl.errors import RewardError


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    groups = draw(st.lists(st.integers(0, 4), min_size=1, max_size=24))
    rewards = draw(st.lists(st.integers(-8, 8), min_size=len(groups), max_size=len(groups)))
    return torch.tensor(rewards, dtype=torch.float64) / 4, torch.tensor(groups)


@settings(deadline=None)
@given(batches(), st.booleans())
def test_advantages_equal_a_loop_over_groups(batch: tuple[torch.Tensor, torch.Tensor], normalize: bool) -> None:
    rewards, groups = batch
    expected = np.zeros(len(rewards))
    for group in set(groups.tolist()):
        members = np.flatnonzero(groups.numpy() == group)
        values = rewards.numpy()[members]
        expected[members] = values - values.mean()
        if normalize and len(members) > 1:
            expected[members] /= values.std(ddof=1) + 1e-6
    advantages = group_advantages(rewards, groups, normalize_std=normalize)
    assert advantages.dtype == torch.float32
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-6, atol=1e-7)


@settings(deadline=None)
@given(batches(), st.booleans(), st.integers(-16, 16))
def test_a_constant_added_to_all_rewards_changes_nothing(
    batch: tuple[torch.Tensor, torch.Tensor], normalize: bool, constant: int
) -> None:
    rewards, groups = batch
    before = group_advantages(rewards, groups, normalize_std=normalize)
    after = group_advantages(rewards + constant, groups, normalize_std=normalize)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(batches(), st.booleans(), st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_their_advantages(batch, normalize: bool, random) -> None:
    rewards, groups = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    permuted = group_advantages(rewards[order], groups[order], normalize_std=normalize)
    expected = group_advantages(rewards, groups, normalize_std=normalize)[order]
    torch.testing.assert_close(permuted, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_groups_of_one_and_groups_of_equal_rewards_get_exactly_zero(normalize: bool) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([5, 5, 5, 9]), normalize_std=normalize, eps=1e-30)
    assert torch.equal(advantages, torch.zeros(4))


def test_a_batch_without_rollouts_gives_no_advantages() -> None:
    empty = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), normalize_std=True)
    assert empty.shape == (0,)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(RewardError, match="not finite"):
        group_advantages(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]), normalize_std=True)


def test_rewards_without_their_group_are_refused() -> None:
    with pytest.raises(RewardError, match="do not match"):
        group_advantages(torch.zeros(2), torch.tensor([0]), normalize_std=True)
