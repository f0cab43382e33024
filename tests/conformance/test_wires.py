"""Agents on `/v1/messages` and `/v1/responses`, on every engine: each token is what plain transformers computes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import pytest
from conformance_cases import Build, Subject, make_requests, require_routes, require_scores
from episode_texts import TEXTS
from library_pythons import ROOT, python_with
from wire_agents import message, response

from moerl.contract.episodes import AgentEndpoint, Session
from moerl.contract.ports import Chat, Prompt
from moerl.contract.trajectory import Trajectory, TurnKind
from moerl.episodes.play import Episode, play

QUESTION = {"role": "user", "content": "a question"}
PROMPT = Prompt("p", TEXTS.render([QUESTION], (), True), {}, Chat((QUESTION,)))


def require_exact(agent: Callable[[AgentEndpoint], Awaitable[None]], build: Build, subject: Subject) -> None:
    """Raises unless every token of 3 turns on each wire is that of a full forward pass. Three episodes."""

    async def environment(session: Session) -> Mapping[str, float]:
        async with session.serve(PROMPT) as endpoint:
            await agent(endpoint)
        return {"reward": 1.0}

    episodes, model = [Episode(request, environment) for request in make_requests(3, 120)], subject.model(0)
    check = lambda record: Trajectory(**record.values)  # noqa: E731 - an argument
    ends = list(play(episodes, build().stream(), check, TEXTS, turn_seconds=300.0))
    assert [str(each.error) for each in ends if each.error is not None] == []
    assert [len(each.records) for each in ends] == [2, 2, 2], "one session for each wire"
    for trajectory in (Trajectory(**record.values) for each in ends for record in each.records):
        require_routes(trajectory, model)
        require_scores(trajectory, model)
        assert trajectory.routed.all()
        assert sum(turn.kind is TurnKind.SAMPLED for turn in trajectory.turns) == 3


def test_turns_on_both_wires_are_scored_and_routed_as_by_a_full_forward_pass(build: Build, subject: Subject):
    async def agent(endpoint: AgentEndpoint) -> None:
        messages, items = [QUESTION], [QUESTION]
        for turn in range(3):
            made = await message(endpoint, messages, max_tokens=5 + turn)
            result = {"type": "tool_result", "tool_use_id": "x", "content": f"more {turn}"}
            messages += [{"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}]
            made = await response(endpoint, items, instructions="be brief", max_output_tokens=5 + turn)
            items += [*made["output"], {"role": "user", "content": f"and {turn}"}]

    require_exact(agent, build, subject)


@pytest.mark.environments
def test_turns_by_the_clients_of_both_wires_are_scored_and_routed_as_by_a_full_forward_pass(
    build: Build, subject: Subject
):
    # The environment of verifiers has both clients.
    python = python_with("verifiers")

    async def agent(endpoint: AgentEndpoint) -> None:
        environment = os.environ | endpoint.environment | {"NO_PROXY": "127.0.0.1"}
        environment.pop("PYTHONPATH", None)
        program = str(ROOT / "tests" / "wire_turns_agent.py")
        process = await asyncio.create_subprocess_exec(python, program, env=environment)
        assert await process.wait() == 0

    require_exact(agent, build, subject)
