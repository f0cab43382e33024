"""Agents that speak chat completions: tokens stay as they were sampled, or a request is refused by name."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from chat_streams import END_TEXT, MORE, QUESTION, TOOL, ask, decode, encode, hermes, message, played, says, texts
from episode_streams import FakeStream
from sglang_live import ENVIRONMENT as SGLANG_ENVIRONMENT

from moerl.contract.episodes import AgentEndpoint, Message, Session, in_thread
from moerl.contract.ports import Chat, Prompt, RolloutRecord, RolloutRequest
from moerl.contract.trajectory import Trajectory
from moerl.episodes.session import TokenSession
from moerl.errors import EpisodeError
from moerl.rollout.sglang.install import python_of

AGENT = Path(__file__).parents[2] / "openai_agent.py"

PROMPT = Prompt("p", hermes([QUESTION], (), True), {}, Chat((QUESTION,)))


def test_a_conversation_goes_on_behind_the_tokens_that_were_sampled():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        history = [QUESTION, await message(endpoint, [QUESTION]), MORE]
        history.append(await message(endpoint, history))
        assert [each["content"] for each in history] == ["two and two?", "four", "and one?", "five"]

    (text,) = texts(played(agent, says("four", "five")))
    assert text == hermes([QUESTION, {"role": "assistant", "content": "four"}, MORE], [], True) + "five" + END_TEXT


def test_calls_stand_apart_from_the_text_and_come_back_as_they_were_sampled():
    call = '{"arguments":   {"a": [2, 2]}, "name": "add"}'
    sampled = f"I add.\n<tool_call>\n{call}\n</tool_call>"

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION], tools=[TOOL])
        assert first["content"] == "I add."
        (made,) = first["tool_calls"]
        assert (made["type"], made["function"]["name"]) == ("function", "add")
        assert json.loads(made["function"]["arguments"]) == {"a": [2, 2]}
        result = {"role": "tool", "tool_call_id": made["id"], "content": "4"}
        # Clients write the JSON of a call in their own way, and send what they know as null.
        made["function"]["arguments"] = json.dumps({"a": [2, 2]}, indent=1)
        again = {**first, "tool_calls": [made], "refusal": None, "annotations": []}
        answer = await ask(endpoint, [QUESTION, again, result], tools=[TOOL])
        choice = answer.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("four", "stop")

    (text,) = texts(played(agent, says(sampled, "four"), tools=[TOOL]))
    start = hermes([QUESTION, {"role": "assistant", "content": sampled}], [TOOL], False)
    assert text == f"{start}<|im_start|>tool\n4{END_TEXT}\n<|im_start|>assistant\nfour{END_TEXT}"


def test_calls_side_by_side_have_ids_of_their_own_and_the_turn_ends_with_calls():
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        choice = (await ask(endpoint, [QUESTION], tools=[TOOL])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2

    texts(played(agent, says(f"{one}\n{one}"), tools=[TOOL]))


def test_a_history_that_branches_off_goes_on_in_a_fork_behind_the_last_same_answer():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        history = [QUESTION, await message(endpoint, [QUESTION])]
        await message(endpoint, [*history, MORE])
        other = await message(endpoint, [*history, {"role": "user", "content": "and two?"}])
        assert other["content"] == "six"
        assert (await message(endpoint, [QUESTION]))["content"] == "4"

    episode = played(agent, says("four", "five", "six", "4"))
    first, fork, again = texts(episode)
    lineages = [record.values["lineage"] for record in episode.records]
    assert lineages[1].parent_rollout_id == "r0"
    assert decode(encode(first)[: lineages[1].fork_at]) == hermes([QUESTION], [], True) + "four" + END_TEXT
    assert fork.endswith(f"and two?{END_TEXT}\n<|im_start|>assistant\nsix{END_TEXT}")
    assert again == hermes([QUESTION], [], True) + "4" + END_TEXT
    assert [int(record.values["sampled"].sum()) for record in episode.records] == [10, 4, 2]


def test_requests_side_by_side_with_one_history_are_forks():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answers = await asyncio.gather(*(message(endpoint, [QUESTION]) for _ in range(3)))
        assert sorted(each["content"] for each in answers) == ["a", "b", "c"]

    assert len(texts(played(agent, says("a", "b", "c")))) == 3


def test_a_request_that_comes_while_one_of_two_choices_is_there_is_a_fork():
    stream, held = says("a", "b", "c"), list[RolloutRecord]()
    answered = stream.answers

    def holds_the_second(request: RolloutRequest) -> Sequence[RolloutRecord]:
        found = answered(request)
        if len(stream.asked) == 2:
            held.extend(found)
            return []
        return [*held, *found]

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        both = asyncio.ensure_future(ask(endpoint, [QUESTION], n=2))
        while len(stream.asked) < 2 or not cast(TokenSession, session).turns:
            await asyncio.sleep(0)
        assert (await message(endpoint, [QUESTION]))["content"] == "c"
        assert len((await both).json()["choices"]) == 2

    stream.answers = holds_the_second
    assert len(texts(played(agent, stream))) == 3


def test_several_choices_are_forks_and_each_can_be_gone_on_with():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        choices = (await ask(endpoint, [QUESTION], n=2)).json()["choices"]
        assert sorted(each["message"]["content"] for each in choices) == ["a", "b"]
        second = next(each["message"] for each in choices if each["message"]["content"] == "b")
        await message(endpoint, [QUESTION, second, MORE])

    found = texts(played(agent, says("a", "b", "c")))
    assert sorted(len(each) for each in found)[0] == len(hermes([QUESTION], [], True) + "a" + END_TEXT)
    assert any("b" + END_TEXT in each and "c" + END_TEXT in each for each in found)


def test_messages_that_begin_in_another_way_are_a_session_of_their_own():
    system = {"role": "system", "content": "be short"}

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        assert (await message(endpoint, [system, QUESTION]))["content"] == "4"

    episode = played(agent, says("4"))
    assert texts(episode) == [hermes([system, QUESTION], [], True) + "4" + END_TEXT]
    assert episode.records[0].values["lineage"].episode == "r0"


@pytest.mark.parametrize(
    ("edited", "seen"),
    [
        ({"role": "assistant", "content": "4"}, "message 1 is no answer of the policy"),
        ({"role": "assistant", "content": "four", "tool_calls": [{"id": "x"}]}, "message 1 is no answer"),
    ],
)
def test_a_history_with_an_answer_that_was_not_given_is_refused(edited: Message, seen: str):
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await message(endpoint, [QUESTION])
        answer = await ask(endpoint, [QUESTION, edited, MORE])
        assert answer.status_code == 400
        assert seen in answer.json()["error"]["message"]

    assert len(texts(played(agent, says("four")))) == 1


def test_a_template_that_writes_earlier_answers_differently_is_refused():
    def trims(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        return hermes([{**each, "content": each["content"].strip()} for each in messages], tools, ask)

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION])
        answer = await ask(endpoint, [QUESTION, first, MORE])
        assert answer.status_code == 400
        assert "template writes an answer differently" in answer.json()["error"]["message"]

    assert len(texts(played(agent, says(" four "), render=trims))) == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"seed": 1}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"speculation": True}, "speculation"),
    ],
)
def test_a_field_that_a_run_does_not_do_is_refused_by_name_or_left_aside_if_that_was_said(
    fields: dict[str, Any], name: str
):
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answer = await ask(endpoint, [QUESTION], **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"chat completions: {name};")
        await message(endpoint, [QUESTION])

    async def patient(endpoint: AgentEndpoint, session: Session) -> None:
        assert (await message(endpoint, [QUESTION], **fields))["content"] == "four"

    assert len(texts(played(agent, says("four")))) == 1
    assert len(texts(played(patient, says("four"), ignored=[name], tools=fields.get("tools", ())))) == 1


def test_a_text_ends_an_answer_and_what_was_sampled_behind_it_never_was():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = (await ask(endpoint, [QUESTION], stop=["ur", "five"])).json()["choices"][0]
        assert (first["message"]["content"], first["finish_reason"]) == ("fo", "stop")
        history = [QUESTION, first["message"], MORE]
        assert (await message(endpoint, history, stop="never"))["content"] == "five"

    episode = played(agent, says("four and more", "five"))
    (text,) = texts(episode)
    assert text == hermes([QUESTION, {"role": "assistant", "content": "four"}, MORE], [], True) + "five" + END_TEXT
    values = episode.records[0].values
    assert int(values["sampled"].sum()) == len("four") + len("five") + 1
    Trajectory(**values)


def test_a_picture_is_refused():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        parts = [{"type": "text", "text": "two "}, {"type": "image_url", "image_url": {"url": "x"}}]
        answer = await ask(endpoint, [{"role": "user", "content": parts}])
        assert answer.status_code == 400
        assert "messages.0.content" in answer.json()["error"]["message"]
        parts[1:] = [{"type": "text", "text": "and two?"}]
        await message(endpoint, [{"role": "user", "content": parts}])

    assert texts(played(agent, says("four"))) == [hermes([QUESTION], [], True) + "four" + END_TEXT]


def test_ids_log_probs_and_numbers_of_tokens_come_where_they_are_asked_for():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        fields = {"return_token_ids": True, "logprobs": True, "temperature": 1.0, "max_completion_tokens": 3}
        content = (await ask(endpoint, [QUESTION], **fields)).json()
        choice, prompt = content["choices"][0], encode(hermes([QUESTION], [], True))
        assert (content["prompt_token_ids"], choice["token_ids"]) == (prompt, encode("fou"))
        assert choice["finish_reason"] == "length"
        assert [each["token"] for each in choice["logprobs"]["content"]] == ["f", "o", "u"]
        found.extend(each["logprob"] for each in choice["logprobs"]["content"])
        assert content["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 3,
            "total_tokens": len(prompt) + 3,
        }

    found: list[float] = []
    episode = played(agent, says("four"))
    assert episode.records[0].values["rollout_logprobs"][-3:].tolist() == found


def test_a_stream_has_the_same_in_events():
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answer = await ask(endpoint, [QUESTION], tools=[TOOL], stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert done == "[DONE]"
        begun, ended, usage = map(json.loads, events)
        assert begun["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
        assert (ended["choices"][0]["delta"], ended["choices"][0]["finish_reason"]) == ({}, "tool_calls")
        assert usage["usage"]["completion_tokens"] == len(one) + 1

    texts(played(agent, says(one), tools=[TOOL]))


def test_a_caller_that_gives_up_leaves_no_turn_behind_and_may_ask_again():
    """Its answer never comes; the next one does, in the same session."""
    answers = says("four")

    def late(request: RolloutRequest) -> list[RolloutRecord]:
        return [] if len(stream.asked) == 1 else list(answers.answers(request))

    stream = FakeStream(late)

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        body = {"messages": [QUESTION]}
        with (
            httpx.Client(trust_env=False, timeout=httpx.Timeout(20.0, read=0.2)) as client,
            pytest.raises(httpx.ReadTimeout),
        ):
            await in_thread(lambda: client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers))
        for _ in range(100):  # the server sees that its caller is gone, then the session is free
            await asyncio.sleep(0.01)
        await message(endpoint, [QUESTION])

    (text,) = texts(played(agent, stream))
    assert text.endswith(f"four{END_TEXT}")


def test_other_keys_and_paths_and_broken_bodies_are_refused_and_a_key_ends_with_its_context():
    kept: list[AgentEndpoint] = []

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        kept.append(endpoint)
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        with httpx.Client(trust_env=False, timeout=60.0) as client:
            get = lambda path, **kw: in_thread(lambda: client.get(endpoint.url + path, **kw))  # noqa: E731
            post = lambda body: in_thread(  # noqa: E731
                lambda: client.post(f"{endpoint.url}/chat/completions", content=body, headers=headers)
            )
            assert (await get("/models")).status_code == 401
            assert (await get("/models", headers={"Authorization": "Bearer no"})).status_code == 401
            assert (await get("/models", headers=headers)).json()["data"][0]["id"] == "policy"
            assert (await get("/embeddings", headers=headers)).status_code == 404
            half = json.dumps({"messages": [QUESTION], "tools": [{"name": "\ud83d"}]})
            for body in ("{", "[]", "", '"x"', "[" * 100_000, half):
                assert (await post(body)).status_code == 400
        async with session.serve(PROMPT) as other:
            await message(other, [QUESTION])
        assert (await ask(other, [QUESTION])).status_code == 401

    assert played(agent, says("four")).error is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{kept[0].url}/models", trust_env=False)


def test_a_session_that_is_over_says_so():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION])
        answer = await ask(endpoint, [QUESTION, first, MORE])
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "a session that is over cannot sample" in error["message"]
        assert error["code"] == "context_length_exceeded", "as clients of OpenAI's API know it"

    texts(played(agent, says("four and more"), max_tokens=9))


def test_an_endpoint_gives_its_key_to_environments_and_not_to_messages():
    endpoint = AgentEndpoint("http://127.0.0.1:1/v1", "secret")
    assert endpoint.environment == {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": "secret",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1",
        "ANTHROPIC_API_KEY": "secret",
    }
    assert "secret" not in repr(endpoint)


def test_a_session_that_is_used_without_its_door_is_refused():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await session.sample()
        answer = await ask(endpoint, [QUESTION])
        assert answer.status_code == 400
        assert "used without its door" in answer.json()["error"]["message"]
        with pytest.raises(EpisodeError, match="used without its door"):
            async with session.serve(PROMPT):
                pass

    assert len(texts(played(agent, says("four")))) == 1


@pytest.mark.skipif(
    not python_of(SGLANG_ENVIRONMENT).exists(), reason="an environment with OpenAI's client: make sglang"
)
def test_openais_own_client_speaks_with_the_policy_as_with_any_model():
    """Tools, streams, several answers and errors, by a program that knows nothing of moerl."""
    call = "<tool_call>\n{}\n</tool_call>"
    calls = "\n".join(call.format(json.dumps({"name": "add", "arguments": {"of": of}})) for of in ([2, 2], [1]))
    seen: dict[str, Any] = {}

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        program = await asyncio.create_subprocess_exec(
            *(str(python_of(SGLANG_ENVIRONMENT)), str(AGENT)),
            env=os.environ | endpoint.environment,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await program.communicate()
        assert program.returncode == 0
        seen.update(json.loads(output))

    episode = played(agent, says(calls, "four", "yes", "a", "b"), tools=[TOOL], max_tokens=4000)
    assert len(texts(episode)) == 3, "the prompt's session, and a fork for each answer that was asked for again"
    refused = seen.pop("refused")
    assert "temperature; seen: 0.3; expected: 1.0" in refused
    assert seen == {
        "models": ["policy"],
        "calls": [{"of": [2, 2]}, {"of": [1]}],
        "finish_reason": "tool_calls",
        "logprobs": len(calls) + 1,
        "answer": "four",
        "usage": 5,
        "streamed": "yes",
        "several": ["a", "b"],
    }
