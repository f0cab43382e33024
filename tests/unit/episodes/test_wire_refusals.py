"""Requests on `/v1/messages` and `/v1/responses` that cannot be carried out as they ask are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chat_streams import MORE, QUESTION, TOOL, played, says, texts
from wire_agents import ADD, ADD_FUNCTION, CALL, CALLED, OUTPUT, RESULT, SAID, USED, message, post, response

from moerl.contract.episodes import AgentEndpoint, Session

ANSWER = {"role": "assistant", "content": [SAID]}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "four"}]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
TURN = [QUESTION, {"role": "assistant", "content": [USED]}]


def refused(path: str, body: Mapping[str, Any], *, ignored: Sequence[str] = ()) -> str:
    """Returns the error of a request behind an answer, with which the door can go on."""
    found = list[str]()

    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await message(endpoint, [QUESTION])
        answer = await post(endpoint, path, body)
        if answer.status_code != 200:
            content = answer.json()
            assert (answer.status_code, content["type"]) == (400, "error")
            assert (content["error"]["type"], content["error"]["code"]) == ("invalid_request_error", "refused")
            found.append(content["error"]["message"])
        await message(endpoint, [QUESTION, ANSWER, MORE])

    played_texts = texts(played(agent, says("four", "five", "six"), ignored=ignored))
    assert len(played_texts) == (1 if found else 2)
    return "".join(found)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{**ADD, "strict": True}]}, "tools.0.strict"),
        ({"container": "x"}, "container"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.user.content.0"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages.0"),
        ({"messages": [QUESTION, {"role": "system", "content": [IMAGE]}]}, "messages.1.system.content.0.type"),
        ({"messages": [{"role": "user", "content": [{**SAID, "citations": [1]}]}]}, "messages.0.user.content.0.text"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [THOUGHT, SAID]}, MORE]}, "messages.1.assistant"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [USED, SAID]}, MORE]}, "messages.1.assistant"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [SAID, SAID]}, MORE]}, "messages.1.assistant"),
        ({"messages": [*TURN, {"role": "user", "content": [SAID, RESULT]}]}, "messages.2.user.content"),
        ({"messages": [*TURN, {"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]}, "messages.2.user"),
    ],
)
def test_a_message_that_asks_for_what_a_run_does_not_do_is_refused_by_name(fields: dict[str, Any], name: str):
    seen = refused("messages", {"messages": [QUESTION], **fields})
    assert seen.startswith(f"/v1/messages: {name}")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"input": []}, "input"),
        ({"input": [QUESTION, {"type": "item_reference", "id": "x"}]}, "input.1"),
        ({"input": [QUESTION, {"type": "reasoning", "id": "x", "summary": []}, ITEM, MORE]}, "input.1"),
        ({"input": [QUESTION, {"type": "custom_tool_call", "call_id": "1", "name": "x", "input": ""}]}, "input.1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.message.content.0.type"),
        ({"input": [{**ITEM, "content": [{"type": "refusal", "refusal": "no"}]}]}, "input.0.message.content.0.type"),
        (
            {"input": [{**ITEM, "content": [{"type": "output_text", "text": "x", "annotations": [1]}]}]},
            "input.0.message.content.0.annotations",
        ),
        ({"input": [CALLED, {**OUTPUT, "output": [{"type": "input_file"}]}]}, "input.1.function_call_output.output.0"),
        ({"input": [{**ITEM, "phase": "commentary"}]}, "input.0.message.phase"),
        ({"input": [1]}, "input.0"),
    ],
)
def test_a_response_that_asks_for_what_a_run_does_not_do_is_refused_by_name(fields: dict[str, Any], name: str):
    seen = refused("responses", {"input": [QUESTION], **fields})
    assert seen.startswith(f"/v1/responses: {name}")


def test_fields_that_are_named_are_left_aside_on_both_wires():
    fields = {"thinking": {"type": "adaptive"}, "temperature": 0.5}
    assert refused("messages", {"messages": [QUESTION], **fields}, ignored=["thinking", "temperature"]) == ""
    assert refused("responses", {"input": "two and two?", "reasoning": {"effort": "low"}}, ignored=["reasoning"]) == ""


@pytest.mark.parametrize(
    "edited",
    [
        [SAID, USED],
        [{**SAID, "text": "I add"}, USED],
        [{**SAID, "text": "I add."}],
        [USED],
        [{**SAID, "text": "I add."}, {**USED, "input": {"of": [2, 3]}}],
        [{**SAID, "text": "I add."}, {**USED, "id": "toolu_1"}],
        [{**SAID, "text": "I add."}, {**USED, "name": "sub"}],
        [{**SAID, "text": "I add."}, USED, USED],
    ],
)
def test_a_history_with_an_edited_answer_is_refused_with_its_place_on_both_wires(edited: list[dict[str, Any]]):
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await message(endpoint, [QUESTION], tools=tools, system="be short")
        history = [QUESTION, {"role": "assistant", "content": edited}, MORE]
        answer = await post(endpoint, "messages", {"messages": history, "tools": tools, "system": "be short"})
        assert answer.status_code == 400
        seen = "the history is none that this episode had; seen: {} is no answer of the policy"
        assert seen.format("messages.1") in answer.json()["error"]["message"]
        answer = await post(endpoint, "responses", {"input": [QUESTION, *items, MORE], "tools": [ADD_FUNCTION]})
        assert answer.status_code == 400
        assert seen.format("input.1") in answer.json()["error"]["message"]

    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    items = [
        {"role": "assistant", "content": each["text"]}
        if each["type"] == "text"
        else {**CALLED, "call_id": each["id"], "name": each["name"], "arguments": str(each["input"]).replace("'", '"')}
        for each in edited
    ]
    assert len(texts(played(agent, says(f"I add.{CALL}"), tools=[TOOL]))) == 1


def test_an_answer_whose_items_come_back_in_another_order_is_refused():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await response(endpoint, [QUESTION], tools=[ADD_FUNCTION])
        said, called = first["output"]
        body = {"input": [QUESTION, called, said, OUTPUT], "tools": [ADD_FUNCTION]}
        answer = await post(endpoint, "responses", body)
        assert answer.status_code == 400
        assert "/v1/responses: the history is none" in answer.json()["error"]["message"]

    assert len(texts(played(agent, says(f"I add.{CALL}"), tools=[TOOL]))) == 1


def test_other_tools_behind_answers_are_refused_in_the_words_of_the_wire():
    seen = refused("messages", {"messages": [QUESTION, ANSWER, MORE], "tools": [ADD]})
    assert seen.startswith("/v1/messages: tools: others than before")
    seen = refused("responses", {"input": [QUESTION, ITEM, MORE], "tools": [ADD_FUNCTION]})
    assert seen.startswith("/v1/responses: tools: others than before")


def test_a_session_that_is_over_says_so_on_both_wires():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        await message(endpoint, [QUESTION])
        for path, body in (
            ("messages", {"messages": [QUESTION, ANSWER, MORE]}),
            ("responses", {"input": [QUESTION, ITEM, MORE]}),
        ):
            answer = await post(endpoint, path, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")

    texts(played(agent, says("four"), max_tokens=5))


def test_another_key_in_the_header_of_anthropics_clients_is_refused():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answer = await post(AgentEndpoint(endpoint.url, "no"), "messages", {"messages": [QUESTION]})
        assert (answer.status_code, answer.json()["type"]) == (401, "error")
        await message(endpoint, [QUESTION])

    texts(played(agent, says("four")))
