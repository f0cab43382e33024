"""Limits of episodes: no turn begins once one is reached, and the end is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from episode_streams import FakeStream, check, request
from episode_texts import TEXTS

from moerl.config.rollouts import EpisodeConfig
from moerl.contract.episodes import Session
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import FinishReason
from moerl.episodes.limits import LIMITS, Meter
from moerl.episodes.play import Episode, PlayedEpisode, play
from moerl.errors import SessionOverError


def played(environment, limits: EpisodeConfig) -> PlayedEpisode:
    stream = FakeStream()
    (episode,) = play([Episode(request(), environment)], stream, check, TEXTS, turn_seconds=300.0, limits=limits)
    return episode


def num_turns(episode: PlayedEpisode) -> list[int]:
    return [len(check(record).sampled_turns) for record in episode.records]


async def until_over(session: Session) -> Mapping[str, float]:
    while not session.is_over:
        await session.sample()
        session.count_calls(2)
        session.observe("b")
    return {"reward": 0.5}


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        (EpisodeConfig(max_turns=2), 2),
        (EpisodeConfig(max_tokens=6), 2),
        (EpisodeConfig(max_tokens=7), 3),
        (EpisodeConfig(max_calls=3), 2),
        (EpisodeConfig(max_calls=4), 3),
        (EpisodeConfig(max_turns=9, max_tokens=6), 2),
    ],
)
def test_no_turn_begins_once_a_limit_is_reached(limits: EpisodeConfig, turns: int) -> None:
    episode = played(until_over, limits)
    assert num_turns(episode) == [turns]
    assert episode.error is None
    assert getattr(limits, episode.stopped_by) is not None
    values = episode.records[0].values
    assert values["rewards"] == {"reward": 0.5}
    assert values["finish_reason"] is FinishReason.LENGTH


def test_an_episode_that_ends_by_itself_at_its_limit_was_not_limited() -> None:
    async def two_turns(session: Session) -> Mapping[str, float]:
        for _ in range(2):
            await session.sample()
            session.observe("b")
        return {"reward": 1.0}

    episode = played(two_turns, EpisodeConfig(max_turns=2))
    assert episode.stopped_by == ""
    assert episode.records[0].values["finish_reason"] is FinishReason.STOP


def test_limits_count_all_sessions_of_an_episode() -> None:
    async def helpers(session: Session) -> Mapping[str, float]:
        sessions = [session, session.open("other", "a"), session.open("other", "b")]
        turns = await asyncio.gather(*(each.sample() for each in sessions), return_exceptions=True)
        assert [isinstance(turn, SessionOverError) for turn in turns] == [False, False, True]
        assert [each.is_over for each in sessions] == [True] * 3
        return {"reward": 1.0}

    assert num_turns(played(helpers, EpisodeConfig(max_turns=2))) == [1, 1]


def test_an_environment_that_does_not_look_is_told_the_limit() -> None:
    async def for_ever(session: Session) -> Mapping[str, float]:
        while True:
            await session.sample()
            session.observe("b")

    episode = played(for_ever, EpisodeConfig(max_turns=3))
    assert episode.error is not None
    assert episode.error.reason is Reason.EPISODE_FAILED
    assert "episode.max_turns is reached" in str(episode.error.seen)
    assert episode.stopped_by == "max_turns"


def test_seconds_run_from_the_start_of_the_episode() -> None:
    now = [100.0]
    meter = Meter(EpisodeConfig(max_seconds=5.0), clock=lambda: now[0])
    assert not meter.stops()
    now[0] = 105.0
    assert meter.stops()
    assert meter.stopped_by == "max_seconds"


def test_every_key_of_a_limit_is_looked_at() -> None:
    assert tuple(name for name in EpisodeConfig.model_fields if name.startswith("max_")) == LIMITS
    assert [getattr(EpisodeConfig(), name) for name in LIMITS] == [None] * len(LIMITS)
