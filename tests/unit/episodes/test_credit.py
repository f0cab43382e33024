"""Rewards of turns: given in an episode, carried by its trajectories, and found again where advantages are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from episode_streams import check, ends
from policy_rows import grpo

from moerl.algorithms.arrays import rewarded, with_advantages
from moerl.contract.episodes import Session
from moerl.contract.trajectory import TURN_REWARDS, Trajectory
from moerl.errors import EpisodeError
from moerl.orchestration.selection import FILTERS


def trajectories(environment, count: int = 1) -> list[Trajectory]:
    found = ends(environment, count=count)
    assert [episode.error for episode in found] == [None] * count
    return [check(record) for episode in found for record in episode.records]


def of_turns(rewards: Sequence[float]):
    """An environment that rewards each of its turns."""

    async def play(session: Session) -> Mapping[str, float]:
        for number, reward in enumerate(rewards):
            if number:
                session.observe("b")
            await session.sample()
            session.credit(reward)
        return {"reward": 1.0}

    return play


def test_the_reward_of_a_turn_lies_on_its_last_token() -> None:
    async def twice(session: Session) -> Mapping[str, float]:
        await session.sample()
        session.observe("ab")
        await session.sample()
        session.credit(0.25)
        session.credit(0.5)
        session.credit(-1.0, turn=0)
        return {"reward": 1.0}

    (trajectory,) = trajectories(twice)
    rewards_S = trajectory.scores[TURN_REWARDS]
    ends_of_turns = [turn.end - 1 for turn in trajectory.sampled_turns]
    assert rewards_S[ends_of_turns].tolist() == [-1.0, 0.75]
    assert np.count_nonzero(rewards_S) == 2
    batch = rewarded([trajectory])
    assert batch.turn_index_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.turn_rewards_N.tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, 0.75]


def test_an_episode_without_rewards_of_turns_carries_none() -> None:
    async def plain(session: Session) -> Mapping[str, float]:
        await session.sample()
        return {"reward": 1.0}

    (trajectory,) = trajectories(plain)
    assert not trajectory.scores
    assert rewarded([trajectory]).turn_rewards_N.tolist() == [0.0] * 3


@pytest.mark.parametrize(("reward", "turn"), [(1.0, 1), (1.0, -2), (float("nan"), 0), ("1", 0), (10**400, 0)])
def test_a_reward_that_is_none_or_of_no_turn_is_refused(reward: float, turn: int) -> None:
    async def wrong(session: Session) -> Mapping[str, float]:
        with pytest.raises(EpisodeError, match="one of 0 turns"):
            session.credit(1.0)
        await session.sample()
        with pytest.raises(EpisodeError, match="a reward of a turn"):
            session.credit(reward, turn)
        return {"reward": 1.0}

    assert not trajectories(wrong)[0].scores


def test_a_turn_that_is_retracted_takes_its_reward_with_it() -> None:
    async def retracts(session) -> Mapping[str, float]:
        await session.sample()
        session.credit(1.0)
        session.observe("b")
        await session.sample()
        session.credit(5.0)
        session.retract()
        return {"reward": 1.0}

    assert trajectories(retracts)[0].scores[TURN_REWARDS].sum() == 1.0


def test_turns_of_a_fork_are_counted_from_the_beginning_of_the_session_that_it_comes_from() -> None:
    async def forks(session: Session) -> Mapping[str, float]:
        for _ in range(3):
            await session.sample()
            session.observe("b")
        fork = session.fork("", 2)
        fork.observe("c")
        await fork.sample()
        again = fork.fork()
        again.observe("d")
        await asyncio.gather(again.sample(), session.open("other", "helper").sample())
        return {"reward": 1.0}

    found = trajectories(forks)
    numbers = iter(rewarded(found).turn_index_N.tolist())
    of_sessions = [sorted({next(numbers) for _ in range(each.num_sampled)}) for each in found]
    assert of_sessions == [[0, 1, 2], [2], [3], [0]]


def test_lineages_of_a_dump_that_name_each_other_end() -> None:
    async def forks(session: Session) -> Mapping[str, float]:
        await session.sample()
        fork = session.fork()
        fork.observe("c")
        await fork.sample()
        return {"reward": 1.0}

    first, fork = trajectories(forks)
    object.__setattr__(first.lineage, "parent_rollout_id", fork.lineage.rollout_id)
    assert len(rewarded([first, fork]).turn_index_N) == 6


def test_turns_get_advantages_of_their_own() -> None:
    better, worse = trajectories(of_turns([1.0, 0.0])), trajectories(of_turns([0.0, 0.5]))
    samples = with_advantages([*better, *worse], grpo(credit="turn", normalize_std=False))
    found = [sample.advantages[sample.trajectory.sampled][[0, 3]].tolist() for sample in samples]
    # Both got 1: the first had it after its first turn, the second still had to earn half of it.
    assert found == [[0.0, -0.5], [0.0, 0.5]]


@pytest.mark.parametrize(
    ("first", "second", "equal"), [([1.0, 0.0], [1.0, 0.0], True), ([1.0, 0.0], [0.0, 1.0], False), ([0.0], [], True)]
)
def test_groups_whose_turns_are_rewarded_alike_teach_nothing(
    first: list[float], second: list[float], equal: bool
) -> None:
    async def plain(session: Session) -> Mapping[str, float]:
        await session.sample()
        return {"reward": 1.0}

    group = [*trajectories(of_turns(first)), *trajectories(of_turns(second) if second else plain)]
    assert FILTERS["equal_rewards"](group) is equal


def test_agents_with_other_rewards_than_each_other_teach_nothing_alone() -> None:
    async def duel(session: Session) -> Mapping[str, float]:
        solver = session.open("other", "solver")
        await asyncio.gather(session.sample(), solver.sample())
        session.rewards["reward"], solver.rewards["reward"] = 1.0, 0.0
        return {}

    assert FILTERS["equal_rewards"](trajectories(duel, count=2))
