"""Responses of a group that are trained, where more were sampled."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from factories import make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.contract.trajectory import Trajectory
from moerl.errors import RewardError
from moerl.orchestration.selection import num_episodes, select

_NUMBERS = count()


def response(reward: float, num_sampled: int = 4, style: float = 0.0, episode_id: str = "") -> Trajectory:
    made = make_trajectory(np.random.default_rng(0), num_sampled=num_sampled)
    lineage = replace(made.lineage, rollout_id=f"r{next(_NUMBERS)}", episode_id=episode_id)
    return replace(made, lineage=lineage, rewards={"reward": reward, "style": style})


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=1, max_size=12), st.integers(2, 8), st.integers(0, 9))
def test_failures_and_successes_keep_their_shares_and_their_order(rewards: list[float], keep: int, seed: int) -> None:
    group = [response(reward) for reward in rewards]
    kept = select(group, keep, "shortest", (seed, 3))
    places = [next(i for i, each in enumerate(group) if each is one) for one in kept]
    assert places == sorted(set(places))
    assert len(kept) == min(keep, len(group))
    right, all_right = (sum(each.rewards["reward"] for each in some) for some in (kept, group))
    assert abs(right - len(kept) * all_right / len(group)) <= 1.0
    if 0 < all_right < len(group):
        assert 0 < right < len(kept)
    assert [id(each) for each in kept] == [id(each) for each in select(group, keep, "shortest", (seed, 3))]


def test_the_best_successes_are_kept_and_failures_are_drawn() -> None:
    group = [response(1.0, 9, 0.1), response(0.0, 2), response(1.0, 3, 0.2), response(1.0, 5, 0.9), response(0.0, 8)]
    group += [response(0.0, 7), response(0.0, 6), response(1.0, 4, 0.5)]
    shortest = [each.num_sampled for each in select(group, 4, "shortest", (0, 0)) if each.rewards["reward"]]
    assert shortest == [3, 4]
    styled = [each.rewards["style"] for each in select(group, 4, "style", (0, 0)) if each.rewards["reward"]]
    assert styled == [0.9, 0.5]
    drawn = {
        tuple(e.num_sampled for e in select(group, 4, "style", (0, n)) if not e.rewards["reward"]) for n in range(40)
    }
    assert len(drawn) == 6


def test_a_reward_that_the_task_does_not_give_is_refused() -> None:
    with pytest.raises(RewardError, match=r"rl.keep_by: no such reward; seen: tone; expected: shortest, reward, style"):
        select([response(0.0), response(1.0), response(1.0)], 2, "tone", (0, 0))


def test_episodes_are_kept_whole_and_count_once() -> None:
    group = [
        response(reward, episode_id=name) for name, reward in zip("aabbccdd", (0, 1, 1, 0, 0, 0, 1, 1), strict=True)
    ]
    kept = select(group, 2, "shortest", (0, 0))
    assert num_episodes(group) == 4
    assert num_episodes(kept) == 2
    assert len(kept) == 4
    assert len({trajectory.lineage.episode for trajectory in kept} & {"b", "d"}) == 1, "the first session counts"
