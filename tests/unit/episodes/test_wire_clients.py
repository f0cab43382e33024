"""The clients of Anthropic and of OpenAI's Responses API, as they come, play episodes through the door."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

import pytest
from chat_streams import END_TEXT, QUESTION, TOOL, encode, hermes, played, says, texts
from library_pythons import ROOT, python_with

from moerl.contract.episodes import AgentEndpoint, Session
from moerl.episodes.play import PlayedEpisode

pytestmark = pytest.mark.environments


def call(of: Sequence[int]) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'of': of}})}\n</tool_call>"


BOTH, AGAIN = f"I add.\n{call([2, 2])}\n{call([1])}", f"Once more:\n{call([4, 1])}"


def played_by(program: str, *answers: str) -> tuple[dict[str, Any], PlayedEpisode]:
    """Plays an episode by a program; returns what it printed, and the episode."""
    # The environment of verifiers has both clients.
    python, seen = python_with("verifiers"), dict[str, Any]()

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        environment = os.environ | endpoint.environment | {"NO_PROXY": "127.0.0.1"}
        environment.pop("PYTHONPATH", None)
        command = (python, str(ROOT / "tests" / program))
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert process.returncode == 0
        seen.update(json.loads(output))

    return seen, played(agent, says(*answers), tools=[TOOL], max_tokens=4000)


def whole(*messages: tuple[str, str]) -> str:
    """Text of a session in which these roles said these texts behind the question."""
    said = [{"role": role, "content": content} for role, content in messages]
    return hermes([QUESTION, *said], [TOOL], False).removesuffix("\n")


def test_anthropics_own_client_speaks_with_the_policy_as_with_any_model() -> None:
    seen, episode = played_by("anthropic_agent.py", BOTH, AGAIN, "five! yes")
    (text,) = texts(episode)
    results = (("tool", "4"), ("tool", "error: no such number"))
    asked = (("tool", "5"), ("user", "and in words?"))
    behind = whole(("assistant", BOTH), *results, ("assistant", AGAIN), *asked, ("assistant", "five!"))
    assert text == behind.removesuffix(END_TEXT), "what was sampled behind the text that ends a turn never was"
    edited, forced = seen.pop("refused")
    assert edited[0] == forced[0] == "error"
    assert "/v1/messages: the history is none that this episode had; seen: messages.5 is no answer" in edited[1]
    assert "/v1/messages: tool_choice.type; seen: 'any'" in forced[1]
    prompt = whole(("assistant", BOTH), *results) + "\n<|im_start|>assistant\n"
    assert seen.pop("usage") == [len(encode(prompt)), len(AGAIN) + 1]
    assert seen == {
        "first": ["text", "tool_use", "tool_use"],
        "calls": [{"of": [2, 2]}, {"of": [1]}],
        "ended": "tool_use",
        "streamed": ["Once more:"],
        "again": [{"of": [4, 1]}],
        "answer": "five",
        "stopped": ["stop_sequence", "!"],
    }


def test_openais_own_client_speaks_with_the_policy_by_responses() -> None:
    seen, episode = played_by("responses_agent.py", BOTH, AGAIN, "five and more")
    (text,) = texts(episode)
    results, asked = (("tool", "4"), ("tool", "1")), (("tool", "5"), ("user", "and in words?"))
    behind = whole(("assistant", BOTH), *results, ("assistant", AGAIN), *asked, ("assistant", "five"))
    assert text == behind.removesuffix(END_TEXT), "the last turn was cut"
    edited, stored = seen.pop("refused")
    assert edited[0] == stored[0] == "refused"
    assert "/v1/responses: the history is none that this episode had; seen: input.10 is no answer" in edited[1]
    assert "/v1/responses: previous_response_id; seen: 'resp-" in stored[1]
    events = seen.pop("events")
    assert (events[0], events[-1]) == ("response.created", "response.completed")
    assert "response.function_call_arguments.done" in events
    assert seen.pop("usage")[1] == len(AGAIN) + 1
    assert seen == {
        "first": ["message", "function_call", "function_call"],
        "status": "completed",
        "calls": [{"of": [2, 2]}, {"of": [1]}],
        "streamed": "Once more:",
        "answer": "five",
        "cut": ["incomplete", "max_output_tokens"],
    }
