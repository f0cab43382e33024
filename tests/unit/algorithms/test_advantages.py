"""Advantages relative to the group."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.algorithms.advantages import group_advantages, less_when_overlong, pass_at_k_advantages, whitened
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


def test_leave_one_out_compares_each_reward_with_the_mean_of_the_others() -> None:
    rewards, group = [1.0, 0.0, 0.5, 2.0, 2.0, 7.0], [0, 0, 0, 1, 1, 2]
    found = group_advantages(torch.tensor(rewards), torch.tensor(group), normalize_std=False, baseline="leave_one_out")
    expected = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if group[j] == group[i] and j != i]
        expected.append(reward - sum(others) / len(others) if others else 0.0)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens() -> None:
    advantages, tokens = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3, 1, 6])
    each = whitened(advantages, tokens).repeat_interleave(tokens)
    assert float(each.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(each.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert whitened(torch.ones(3), tokens).tolist() == [0.0, 0.0, 0.0]


def soft_punishment(length: int, longest: int, cache: int) -> float:
    """DAPO, arXiv:2503.14476, equation 13."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("limit", "buffer", "factor"), [(16, 4, 1.0), (16, 4, 0.5), (20, 20, 1.0), (9, 1, 2.0)])
def test_a_reward_falls_over_the_buffer_before_the_limit_and_no_further(limit: int, buffer: int, factor: float) -> None:
    tokens = torch.arange(1, 3 * limit)
    found = less_when_overlong(torch.ones(len(tokens)), tokens, limit, buffer, factor)
    expected = [1.0 + factor * soft_punishment(length, limit, buffer) for length in tokens.tolist()]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(2, 5))
def test_pass_at_k_is_what_a_rollout_adds_to_the_best_of_all_sets_of_others(
    batch: tuple[torch.Tensor, torch.Tensor], k: int
) -> None:
    rewards, groups = batch
    found = pass_at_k_advantages(rewards, groups, k)
    for i, reward in enumerate(rewards.tolist()):
        others = [r for j, r in enumerate(rewards.tolist()) if j != i and groups[j] == groups[i]]
        bests = [max(chosen) for chosen in combinations(others, min(k - 1, len(others))) if chosen]
        expected = sum(max(reward, best) - best for best in bests) / len(bests) if bests else 0.0
        assert float(found[i]) == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_of_binary_rewards_has_the_gradient_of_the_chance_that_one_of_k_is_right() -> None:
    """Over all outcomes of a policy that is right with probability p: the mean of `k A d(log-prob)/dp` is d(1 - (1 -
    p)^k)/dp."""
    k, size, p = 3, 5, 0.3
    total = 0.0
    for right in range(2**size):
        rewards = torch.tensor([float(right >> i & 1) for i in range(size)])
        chance = float(torch.where(rewards > 0, p, 1 - p).prod())
        score = torch.where(rewards > 0, 1 / p, -1 / (1 - p))
        advantages = pass_at_k_advantages(rewards, torch.zeros(size, dtype=torch.int64), k)
        total += chance * float((k * advantages * score).mean())
    assert total == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-5)


@settings(deadline=None)
@given(batches(), st.sampled_from(["mean", "leave_one_out"]), st.booleans(), st.integers(1, 3))
def test_an_episode_of_several_rollouts_counts_once_in_its_group(
    batch: tuple[torch.Tensor, torch.Tensor], baseline, normalize: bool, times: int
) -> None:
    """Gives every rollout of an episode the advantage that the episode would have as one rollout."""
    rewards, groups = batch
    plain = group_advantages(rewards, groups, normalize_std=normalize, baseline=baseline)
    parts = torch.arange(len(rewards)) % times + 1
    episodes = torch.arange(len(rewards)).repeat_interleave(parts)
    split = group_advantages(
        rewards[episodes], groups[episodes], normalize_std=normalize, baseline=baseline, episode_index_B=episodes
    )
    torch.testing.assert_close(split, plain[episodes], rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(batches(), st.integers(2, 5), st.integers(1, 3))
def test_an_episode_of_several_rollouts_counts_once_for_pass_at_k(
    batch: tuple[torch.Tensor, torch.Tensor], k: int, times: int
) -> None:
    """Also if its rollouts have different rewards: the episode has their mean."""
    rewards, groups = batch
    parts = torch.arange(len(rewards)) % times + 1
    episodes = torch.arange(len(rewards)).repeat_interleave(parts)
    around = torch.cat([torch.arange(int(n)) - (n - 1) / 2 for n in parts])
    split = pass_at_k_advantages(rewards[episodes] + around, groups[episodes], k, episodes)
    torch.testing.assert_close(split, pass_at_k_advantages(rewards, groups, k)[episodes], rtol=1e-5, atol=1e-6)


def test_leave_one_out_over_episodes_compares_with_the_mean_of_each_other_episode() -> None:
    rewards, episodes = torch.tensor([1.0, 0.0, 4.0, 2.0, 6.0, 1.0]), torch.tensor([0, 0, 1, 2, 2, 2])
    found = group_advantages(
        rewards,
        torch.zeros(6, dtype=torch.int64),
        normalize_std=False,
        baseline="leave_one_out",
        episode_index_B=episodes,
    )
    means = [0.5, 4.0, 3.0]
    expected = [r - (sum(means) - means[e]) / 2 for r, e in zip(rewards.tolist(), episodes.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected)
