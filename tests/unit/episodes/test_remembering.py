"""Turns of an earlier process: an episode that is played again gets the answers that it had, and asks for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from episode_streams import FakeStream, check, request, response
from episode_texts import TEXTS

from moerl.buffer.turns import KeptTurn, TurnMemory
from moerl.contract.episodes import Session
from moerl.contract.trajectory import FinishReason
from moerl.episodes.play import Episode, PlayedEpisode, play
from moerl.episodes.remembering import RememberingStream


def played(
    environment, known: Mapping[str, KeptTurn], answers=lambda r: [response(r)]
) -> tuple[PlayedEpisode, FakeStream, dict[str, KeptTurn]]:
    kept: dict[str, KeptTurn] = {}
    inner = FakeStream(answers)
    memory = TurnMemory(
        dict(known), lambda answer, asked: kept.update({asked.lineage.rollout_id: KeptTurn.of(answer, asked, 0)})
    )
    stream = RememberingStream(inner, memory)

    def checked(record):
        turn = check(record)
        if not stream.is_known(record):
            stream.keep(turn)
        return turn

    (episode,) = play([Episode(request(), environment)], stream, checked, TEXTS, turn_seconds=300.0)
    assert inner.is_closed
    return episode, inner, kept


async def three_turns(session: Session) -> Mapping[str, float]:
    for _ in range(3):
        await session.sample()
        session.observe("b")
    helper = session.fork("helper", 1)
    helper.observe("c")
    await asyncio.gather(helper.sample(), session.sample())
    return {"reward": 1.0}


def test_turns_that_are_known_are_not_sampled_again_and_the_episode_is_the_same() -> None:
    first, stream, kept = played(three_turns, {})
    names = [asked.lineage.rollout_id for asked in stream.asked]
    assert sorted(kept) == sorted(names) == ["r0#0", "r0#1", "r0#2", "r0#3", "r0~1#0"]
    known = {name: kept[name] for name in names[:3]}
    again, stream, new = played(three_turns, known)
    assert [asked.lineage.rollout_id for asked in stream.asked] == names[3:]
    assert sorted(new) == sorted(names[3:])
    for before, after in zip(first.records, again.records, strict=True):
        left, right = check(before), check(after)
        for name in ("token_ids", "rollout_logprobs", "policy_versions", "expert_ids", "routed"):
            assert (getattr(left, name) == getattr(right, name)).all(), name


def test_an_environment_that_does_something_else_has_its_turns_sampled_anew() -> None:
    async def other(session: Session) -> Mapping[str, float]:
        await session.sample()
        session.observe("another text")
        await session.sample()
        return {"reward": 1.0}

    _, _, kept = played(three_turns, {})
    episode, stream, new = played(other, kept)
    assert episode.error is None
    assert [asked.lineage.rollout_id for asked in stream.asked] == ["r0#1"] == list(new)


def test_an_episode_whose_turns_are_all_known_asks_nothing() -> None:
    _, _, kept = played(three_turns, {})
    episode, stream, new = played(three_turns, kept)
    assert episode.error is None
    assert (stream.asked, new) == ([], {})


def test_turns_that_were_aborted_or_break_off_are_not_kept() -> None:
    async def one_turn(session: Session) -> Mapping[str, float]:
        await session.sample()
        return {"reward": 1.0}

    _, _, kept = played(one_turn, {}, lambda r: [response(r, FinishReason.ABORT)])
    assert kept == {}
    episode, _, kept = played(one_turn, {}, lambda r: [response(replace(r, prompt_ids=(9, 9, 9)))])
    assert episode.error is not None
    assert kept == {}
