"""Episodes on every engine: each token of every turn is what plain transformers computes for exactly these tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from chat_streams import ask
from conformance_cases import (
    Build,
    Engine,
    Subject,
    collect,
    make_requests,
    require_routes,
    require_same,
    require_scores,
)
from episode_texts import TEXTS

from moerl.contract.episodes import Session, in_thread
from moerl.contract.ports import Chat, Prompt, RolloutRecord
from moerl.contract.trajectory import Trajectory, TurnKind
from moerl.episodes.play import Episode, play

Play = Callable[[Session], Awaitable[Mapping[str, float]]]


def played(engine: Engine, environment: Play, count: int, max_tokens: int = 60) -> dict[str, Trajectory]:
    """Plays an episode for each of `count` requests, none of which may be refused."""
    episodes = [Episode(r, environment) for r in make_requests(count, max_tokens)]
    found: dict[str, Trajectory] = {}
    for episode in play(
        episodes, engine.stream(), lambda record: Trajectory(**record.values), TEXTS, turn_seconds=300.0
    ):
        assert episode.error is None
        found |= {record.rollout_id: Trajectory(**record.values) for record in episode.records}
    return found


async def once(session: Session) -> Mapping[str, float]:
    await session.sample()
    return {"reward": 1.0}


async def with_hints(session: Session) -> Mapping[str, float]:
    """Three turns of up to seven tokens, with an observation of other length behind each."""
    for turn in range(3):
        await session.sample(7)
        await asyncio.sleep(0)
        session.observe("hint" * (turn + 1))
    return {"reward": 1.0}


async def with_a_fork(session: Session) -> Mapping[str, float]:
    """Two branches that sample side by side behind a shared turn, and a sub-agent with a prompt of its own."""
    await session.sample(5)
    session.observe("either")
    other, agent = session.fork("other"), session.open("a prompt of its own", "helper")
    await asyncio.gather(session.sample(6), other.sample(6), agent.sample(4))
    other.observe("more")
    await other.sample(3)
    other.rewards["reward"] = 0.5
    return {"reward": 1.0}


async def through_the_door(session: Session) -> Mapping[str, float]:
    """An agent that speaks HTTP: two answers to one question, each gone on with, and a sub-agent."""
    question, more = {"role": "user", "content": "a question"}, {"role": "user", "content": "and more"}
    chat = Chat((question,))
    prompt = Prompt("p", TEXTS.render(chat.messages, (), True), {}, chat)
    async with session.serve(prompt) as endpoint:
        answer = await ask(endpoint, [question], n=2, max_tokens=5)
        choices = [choice["message"] for choice in answer.json()["choices"]]
        await asyncio.gather(*(ask(endpoint, [question, each, more], max_tokens=6) for each in choices))
        await ask(endpoint, [{"role": "system", "content": "another"}, question], max_tokens=4)
    return {"reward": 1.0}


def test_turns_through_the_door_are_scored_and_routed_as_by_a_full_forward_pass(build: Build, subject: Subject):
    model = subject.model(0)
    found = played(build(), through_the_door, 4)
    assert len(found) == 12
    for trajectory in found.values():
        require_routes(trajectory, model)
        require_scores(trajectory, model)
    num_turns = [sum(turn.kind is TurnKind.SAMPLED for turn in each.turns) for each in found.values()]
    assert sorted(num_turns) == [1] * 4 + [2] * 8


def test_an_episode_of_one_turn_is_the_response_without_episodes(build: Build):
    found = played(build(), once, 8, 12)
    require_same(found, collect(build(), make_requests(8)))
    assert all(trajectory.rewards == {"reward": 1.0} for trajectory in found.values())


def test_every_turn_is_scored_and_routed_as_by_a_full_forward_pass(build: Build, subject: Subject):
    model = subject.model(0)
    found = played(build(), with_hints, 12)
    assert len(found) == 12
    for trajectory in found.values():
        require_routes(trajectory, model)
        require_scores(trajectory, model)
        assert trajectory.routed.all()
        kinds = [turn.kind for turn in trajectory.turns]
        assert kinds == [TurnKind.PROMPT, *[TurnKind.SAMPLED, TurnKind.OBSERVATION] * 2, TurnKind.SAMPLED]
        hints = [trajectory.token_ids[turn.start : turn.end].tolist() for turn in trajectory.turns[2:5:2]]
        assert hints == [TEXTS.encode("hint"), TEXTS.encode("hinthint")]


def test_a_turn_brings_the_experts_of_new_inputs_only(build: Build):
    brought: dict[str, list[int]] = {}

    def check(record: RolloutRecord) -> Trajectory:
        trajectory = Trajectory(**record.values)
        name = record.rollout_id.partition("#")[0]
        brought.setdefault(name, []).append(int(trajectory.routed.sum()))
        assert not trajectory.expert_ids[~trajectory.routed].any()
        return trajectory

    episodes = [Episode(r, with_hints) for r in make_requests(6, 60)]
    for episode in play(episodes, build().stream(), check, TEXTS, turn_seconds=300.0):
        (record,) = episode.records
        assert sum(brought[episode.rollout_id]) == len(record.values["token_ids"]) - 1


def test_branches_share_their_prefix_and_train_it_once(build: Build, subject: Subject):
    model = subject.model(0)
    found = played(build(), with_a_fork, 6)
    assert len(found) == 18
    for number in range(6):
        first, fork, agent = (found[name] for name in (f"r{number}", f"r{number}~1", f"r{number}~2"))
        for trajectory in (first, fork, agent):
            require_routes(trajectory, model)
            require_scores(trajectory, model)
            assert trajectory.lineage.episode == f"r{number}"
        at = fork.lineage.fork_at
        assert (fork.lineage.parent_rollout_id, fork.lineage.agent_id) == (f"r{number}", "other")
        assert np.array_equal(first.token_ids[:at], fork.token_ids[:at])
        assert first.sampled[:at].any()
        assert not fork.sampled[:at].any()
        assert (agent.lineage.agent_id, agent.lineage.fork_at) == ("helper", -1)
        assert (first.rewards["reward"], fork.rewards["reward"]) == (1.0, 0.5)
    drawn = [found[name].token_ids[-3:].tolist() for name in found if "~1" not in name and "~2" not in name]
    assert len(drawn) == 6


def test_a_fork_draws_anew(build: Build):
    async def forked(session: Session) -> Mapping[str, float]:
        await session.sample(2)
        other = session.fork()
        await session.sample(12)
        await other.sample(12)
        return {"reward": 0.0}

    episode = [Episode(replace(r, stop_ids=()), forked) for r in make_requests(9, 30)]
    differ = 0
    check = lambda record: Trajectory(**record.values)  # noqa: E731 - an argument
    for each in play(episode, build().stream(), check, TEXTS, turn_seconds=300.0):
        first, other = (record.values["token_ids"].tolist() for record in each.records)
        differ += first != other
    assert differ >= 6  # greedy ones are equal


@pytest.mark.parametrize("count", [40])
def test_more_episodes_than_slots_all_end(build: Build, count: int):
    assert len(played(build(3), with_hints, count)) == count


def test_an_abort_ends_every_episode(build: Build):
    """Turns with a token end with what they have; those without are refused."""
    engine = build(2)

    async def goes_on(session: Session) -> Mapping[str, float]:
        await session.sample(3)
        if not aborted:
            aborted.append(True)
            await in_thread(engine.abort)
        while not session.is_over:
            await session.sample(3)
        return {"reward": 1.0}

    aborted: list[bool] = []
    episodes = [Episode(replace(r, stop_ids=()), goes_on) for r in make_requests(6, 60)]

    def check(record: RolloutRecord) -> Trajectory:
        if record.refusal is not None:
            raise record.refusal
        return Trajectory(**record.values)

    found = list(play(episodes, engine.stream(), check, TEXTS, turn_seconds=300.0))
    assert len(found) == 6
    reasons = [str(each.error.reason) for each in found if each.error is not None]
    assert set(reasons) <= {"nothing_sampled"}
