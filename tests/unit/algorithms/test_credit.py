"""Credit: advantages of episodes, of agents, and of turns, against loops over the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rows import grpo, rewarded_batch

from moerl.algorithms.policy import RewardedBatch


@dataclass(frozen=True)
class Rollout:
    """One session: each turn has its number, its tokens and its reward."""

    group: int
    episode: int
    agent: int
    reward: float
    turns: Sequence[tuple[int, int, float]]


def batch_of(rollouts: Sequence[Rollout]) -> RewardedBatch:
    tokens = [sum(count for _, count, _ in each.turns) for each in rollouts]
    batch = rewarded_batch([each.reward for each in rollouts], [each.group for each in rollouts], tokens)
    numbers = [number for each in rollouts for number, count, _ in each.turns for _ in range(count)]
    gains = [g for each in rollouts for _, count, gain in each.turns for g in (*[0.0] * (count - 1), gain)]
    return replace(
        batch,
        episode_index_B=torch.tensor([each.episode for each in rollouts]),
        agent_index_B=torch.tensor([each.agent for each in rollouts]),
        turn_index_N=torch.tensor(numbers),
        turn_rewards_N=torch.tensor(gains),
    )


@st.composite
def episodes(draw: st.DrawFn) -> list[Rollout]:
    rollouts: list[Rollout] = []
    eighths = st.integers(-8, 8).map(lambda number: number / 8)
    for episode in range(draw(st.integers(1, 6))):
        for agent in draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)):
            first = draw(st.integers(0, 2))
            count = draw(st.integers(1, 4))
            turns = [(first + i, draw(st.integers(1, 3)), draw(eighths)) for i in range(count)]
            rollouts.append(Rollout(episode % 2, episode, agent, draw(eighths), turns))
    return rollouts


def compared(value: float, group: Sequence[tuple[int, float]], *, normalize: bool) -> float:
    """The value less the mean of the group, over its deviation. group: episodes with their values; each episode counts
    once."""
    if len({value for _, value in group}) == 1:
        return 0.0
    share = {episode: 1.0 / sum(other == episode for other, _ in group) for episode, _ in group}
    mean = sum(share[episode] * each for episode, each in group) / len(share)
    squares = sum(share[episode] * (each - mean) ** 2 for episode, each in group)
    return (value - mean) / (np.sqrt(squares / max(len(share) - 1, 1)) + 1e-6 if normalize else 1.0)


@settings(deadline=None, max_examples=60)
@given(episodes(), st.booleans())
def test_a_turn_is_compared_by_what_was_not_earned_before_it_with_the_same_turn_of_the_same_agent(
    rollouts: list[Rollout], normalize: bool
) -> None:
    to_go: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for each in rollouts:
        for place, (number, _, _) in enumerate(each.turns):
            value = each.reward - sum(gain for _, _, gain in each.turns[:place])
            to_go.setdefault((each.group, each.agent, number), []).append((each.episode, value))
    expected = [
        compared(value, to_go[each.group, each.agent, number], normalize=normalize)
        for each in rollouts
        for place, (number, count, _) in enumerate(each.turns)
        for value in [each.reward - sum(gain for _, _, gain in each.turns[:place])]
        for _ in range(count)
    ]
    found = grpo(credit="turn", normalize_std=normalize).compute_advantages(batch_of(rollouts))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(episodes(), st.booleans())
def test_an_agent_is_compared_with_the_same_agent_in_its_group(rollouts: list[Rollout], normalize: bool) -> None:
    groups: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for each in rollouts:
        groups.setdefault((each.group, each.agent), []).append((each.episode, each.reward))
    expected = [compared(e.reward, groups[e.group, e.agent], normalize=normalize) for e in rollouts]
    found = grpo(credit="agent", normalize_std=normalize).compute_advantages(batch_of(rollouts))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-8, 8)), min_size=1, max_size=12))
def test_for_one_agent_and_one_turn_all_credits_are_the_same(rows: list[tuple[int, int]]) -> None:
    batch = rewarded_batch([reward / 8 for _, reward in rows], [group for group, _ in rows], [3] * len(rows))
    by_episode, by_agent, by_turn = (
        grpo(credit=credit).compute_advantages(batch) for credit in ("episode", "agent", "turn")
    )
    assert torch.equal(by_agent, by_episode)
    assert torch.equal(by_turn, by_episode.repeat_interleave(3))


def test_a_proposer_is_not_blamed_for_what_its_solver_gets() -> None:
    rollouts = [
        Rollout(0, episode, agent, reward, [(0, 2, 0.0)])
        for episode, rewards in enumerate([(1.0, -1.0), (0.0, 1.0)])
        for agent, reward in enumerate(rewards)
    ]
    found = grpo(credit="agent", normalize_std=False).compute_advantages(batch_of(rollouts))
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]


@pytest.mark.parametrize("credit", ["agent", "turn"])
def test_a_run_says_what_advantages_belong_to(credit: str) -> None:
    assert f"mean({credit} in the group)" in grpo(credit=credit).describe()
