"""Sessions: tokens that are left, forks, prompts of their own, and calls that their state does not allow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from episode_streams import NUM_TOKENS, FakeStream, check, ends, reason, request, response
from episode_texts import TEXTS
from factories import SPEC

from moerl.contract.episodes import Session
from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.reasons import Reason
from moerl.episodes.play import Episode, play
from moerl.errors import EpisodeError


def test_an_episode_whose_prompt_samples_nothing_keeps_its_id() -> None:
    async def only_the_helper(session: Session) -> Mapping[str, float]:
        await session.open("another prompt", "helper").sample()
        return {"reward": 1.0}

    (episode,) = ends(only_the_helper)
    (record,) = episode.records
    assert (episode.rollout_id, record.rollout_id, record.values["lineage"].episode) == ("r0", "r0~1", "r0")


def test_an_opened_session_gets_no_longer_than_that_of_the_prompt() -> None:
    async def opens(session: Session) -> Mapping[str, float]:
        helper = session.open("x" * 30)
        assert helper.num_left == 3 + NUM_TOKENS - 30
        with pytest.raises(EpisodeError, match="no room to sample"):
            session.open("x" * (3 + NUM_TOKENS))
        await helper.sample()
        return {"reward": 1.0}

    assert ends(opens)[0].error is None


def test_forks_lie_inside_their_parents_and_a_fork_of_an_unused_fork_keeps_the_parent() -> None:
    async def forks(session: Session) -> Mapping[str, float]:
        await session.sample()
        session.observe("abc")
        await session.fork().fork().sample()
        return {"reward": 1.0}

    (episode,) = ends(forks)
    first, fork = (record.values for record in episode.records)
    assert (fork["lineage"].parent_rollout_id, fork["lineage"].fork_at) == ("r0", len(first["token_ids"]))


def test_a_session_says_how_much_is_left_and_when_it_is_over() -> None:
    left: list[int] = []

    async def to_the_end(session: Session) -> Mapping[str, float]:
        while not session.is_over:
            left.append(session.num_left)
            await session.sample(3)
            session.observe("abcdefg")
        with pytest.raises(EpisodeError, match="is over"):
            await session.sample()
        return {"reward": 1.0}

    (episode,) = ends(to_the_end)
    assert left == [40, 30, 20, 10]
    assert len(episode.records[0].values["token_ids"]) == 3 + 40 - 7, "an observation at the end is left out"


def test_calls_that_a_session_does_not_allow_are_refused_by_name() -> None:
    async def wrong(session: Session) -> Mapping[str, float]:
        first = asyncio.ensure_future(session.sample())
        await asyncio.sleep(0)
        with pytest.raises(EpisodeError, match="observe in a session that samples"):
            session.observe("x")
        with pytest.raises(EpisodeError, match="fork in a session that samples"):
            session.fork()
        with pytest.raises(EpisodeError, match="sample in a session that samples"):
            await session.sample()
        await first
        with pytest.raises(EpisodeError, match="no token"):
            session.observe("")
        with pytest.raises(EpisodeError, match="max_tokens"):
            await session.sample(0)
        for number in (-1, 2):
            with pytest.raises(EpisodeError, match=rf"fork; seen: {number} turns; expected: 0 to 1"):
                session.fork("", number)
        return {"reward": 1.0}

    (episode,) = ends(wrong)
    assert episode.error is None


def test_a_prefix_counts_as_the_start_of_the_first_turn_only() -> None:
    texts: list[str] = []

    async def two_turns(session: Session) -> Mapping[str, float]:
        texts.extend([(await session.sample()).text, (await session.sample()).text])
        return {"reward": 1.0}

    list(play([Episode(request(), two_turns, "think: ")], FakeStream(), check, TEXTS, turn_seconds=300.0))
    assert [text.startswith("think: ") for text in texts] == [True, False]


def test_models_of_the_turns_must_agree() -> None:
    other = type(SPEC)(SPEC.num_moe_layers, SPEC.experts_per_token, SPEC.num_experts, SPEC.vocab_size, "another")

    def changes(asked: RolloutRequest) -> list[RolloutRecord]:
        is_second = asked.lineage.rollout_id.endswith("#1")
        return [response(asked, spec=other) if is_second else response(asked)]

    async def two_turns(session: Session) -> Mapping[str, float]:
        await session.sample()
        await session.sample()
        return {"reward": 1.0}

    assert reason(two_turns, FakeStream(changes))[0] == Reason.SPEC_MISMATCH
