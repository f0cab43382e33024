"""Agents that give up and race, stop texts, calls of all kinds: answers come whole, in sessions of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import httpx
import pytest
from chat_streams import END_TEXT, MORE, QUESTION, TOOL, ask, hermes, message, played, says, texts
from episode_streams import FakeStream

from moerl.contract.episodes import AgentEndpoint, Message, Session, in_thread
from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.errors import RequestRefusedError


def test_a_request_for_several_answers_that_is_given_up_leaves_none_of_them_behind():
    """One answer is there, the other one never comes."""
    answers = says("one", "x")

    def late(request: RolloutRequest) -> list[RolloutRecord]:
        return [] if len(stream.asked) == 2 else list(answers.answers(request))

    stream = FakeStream(late)

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        timeout = httpx.Timeout(20.0, read=0.5)
        body = {"messages": [QUESTION], "n": 2}
        with httpx.Client(trust_env=False, timeout=timeout) as client, pytest.raises(httpx.ReadTimeout):
            await in_thread(lambda: client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers))
        for _ in range(100):  # the server sees that its caller is gone
            await asyncio.sleep(0.01)
        await message(endpoint, [QUESTION])

    (text,) = texts(played(agent, stream))
    assert text == hermes([QUESTION], [], True) + "x" + END_TEXT


def test_if_one_of_several_answers_fails_the_others_are_forgotten():
    def refuses(request: RolloutRequest) -> list[RolloutRecord]:
        if len(stream.asked) == 2:
            raise RequestRefusedError("request: not of this model")
        return list(answers.answers(request))

    answers, stream = says("one", "x"), FakeStream(refuses)

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answer = await ask(endpoint, [QUESTION], n=2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "refused")
        await message(endpoint, [QUESTION])

    assert texts(played(agent, stream)) == [hermes([QUESTION], [], True) + "x" + END_TEXT]


def test_a_continuation_goes_on_in_whichever_branch_is_open():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        choices = (await ask(endpoint, [QUESTION], n=2)).json()["choices"]
        for choice in choices:
            await message(endpoint, [QUESTION, choice["message"], MORE])

    assert len(texts(played(agent, says("x", "x", "1", "2")))) == 2


def test_the_end_of_a_turn_is_no_text_that_ends_it():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION], stop=[END_TEXT, "<|"])
        assert first["content"] == "four"
        await message(endpoint, [QUESTION, first, MORE])

    (text,) = texts(played(agent, says("four", "five")))
    assert text == hermes([QUESTION, {"role": "assistant", "content": "four"}, MORE], [], True) + "five" + END_TEXT


def test_a_text_that_ends_a_turn_at_its_limit_ended_it():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answer = await ask(endpoint, [QUESTION], stop=["ur"], max_tokens=4)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"

    texts(played(agent, says("four and more")))


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', '{"a": NaN}'])
def test_a_call_that_no_client_can_send_back_is_none(arguments: str):
    sampled = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION], tools=[TOOL])
        assert (first["content"], first.get("tool_calls")) == (sampled, None)
        await message(endpoint, [QUESTION, first, MORE], tools=[TOOL])

    assert len(texts(played(agent, says(sampled, "four"), tools=[TOOL]))) == 1


def test_other_tools_behind_answers_are_refused_by_name():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION])
        answer = await ask(endpoint, [QUESTION, first, MORE], tools=[TOOL])
        assert answer.status_code == 400
        assert "tools: others than before" in answer.json()["error"]["message"]

    texts(played(agent, says("four")))


def test_tokens_that_come_while_a_template_is_rendered_are_refused():
    """Another door of the session, or the environment, samples in between."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        if len(messages) == 3:
            begun.set()
            assert go_on.wait(20.0)
        return hermes(messages, tools, ask)

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION])
        late = asyncio.ensure_future(ask(endpoint, [QUESTION, first, MORE]))
        await in_thread(begun.wait)
        await session.sample()
        go_on.set()
        answer = await late
        assert answer.status_code == 400
        assert "used without its conversation" in answer.json()["error"]["message"]

    assert len(texts(played(agent, says("four", "five"), render=slow))) == 1
