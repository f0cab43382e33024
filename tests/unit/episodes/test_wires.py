"""Agents that speak `/v1/messages` or `/v1/responses`: their histories go on behind the tokens that were sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from chat_streams import END_TEXT, MORE, QUESTION, TOOL, encode, hermes, played, says, texts
from wire_agents import ADD, ADD_FUNCTION, CALL, CALLED, OUTPUT, RESULT, SAID, USED, message, post, response

from moerl.contract.episodes import AgentEndpoint, Session


def as_answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_message_has_text_calls_numbers_and_the_reason_of_its_end():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION], tools=[ADD], system="be short")
        assert first["content"] == [{"type": "text", "text": "I add."}, USED]
        assert (first["type"], first["role"], first["stop_reason"]) == ("message", "assistant", "tool_use")
        assert first["usage"] == {"input_tokens": len(encode(prompt)), "output_tokens": len(f"I add.{CALL}") + 1}

    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    prompt = hermes([{"role": "system", "content": "be short"}, QUESTION], [tool], True)
    assert texts(played(agent, says(f"I add.{CALL}"))) == [f"{prompt}I add.{CALL}{END_TEXT}"]


def test_results_and_texts_of_a_user_are_messages_of_their_own_and_a_failed_result_says_so():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION], tools=tools)
        failed = {**RESULT, "content": [{**SAID, "text": "no"}], "is_error": True, "cache_control": {"type": "x"}}
        user = {"role": "user", "content": [RESULT, failed, {"type": "text", "text": "so"}]}
        assert (await message(endpoint, [QUESTION, first_of(first), user], tools=tools))["stop_reason"] == "end_turn"

    tools = [{"name": "add", "input_schema": {"type": "object"}, "type": "custom"}]
    (text,) = texts(played(agent, says(CALL, "four"), tools=[TOOL]))
    results = [{"role": "tool", "content": each} for each in ("4", "error: no")]
    history = [QUESTION, as_answer(CALL), *results, {"role": "user", "content": "so"}]
    assert text == hermes(history, [TOOL], True) + f"four{END_TEXT}"


def first_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message of a history that a client makes of an answer."""
    return {"role": "assistant", "content": made["content"]}


def test_a_text_that_ends_a_message_and_its_limit_are_named():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION], stop_sequences=["?", "ur"])
        assert (first["stop_reason"], first["stop_sequence"]) == ("stop_sequence", "ur")
        assert first["content"] == [{"type": "text", "text": "fo"}]
        second = await message(endpoint, [QUESTION, first_of(first), MORE], max_tokens=2)
        assert (second["stop_reason"], second["stop_sequence"]) == ("max_tokens", None)

    assert len(texts(played(agent, says("four and more", "five")))) == 1


def test_an_empty_answer_has_an_empty_text_on_both_wires_and_can_be_gone_on_behind():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await message(endpoint, [QUESTION])
        assert first["content"] == [{"type": "text", "text": ""}]
        await message(endpoint, [QUESTION, {"role": "assistant", "content": []}, MORE])
        other = {"role": "user", "content": "other"}
        second = await response(endpoint, [other])
        assert second["output"][0]["content"][0]["text"] == ""
        await response(endpoint, [other, *second["output"], MORE])

    assert len(texts(played(agent, says("", "five", "", "six")))) == 2


def test_a_stream_of_a_message_has_its_blocks_in_events_with_names():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        answer = await post(endpoint, "messages", {"messages": [QUESTION], "tools": [ADD], "stream": True})
        events = [dict(line.split(": ", 1) for line in each.split("\n")) for each in answer.text.strip().split("\n\n")]
        content = [json.loads(each["data"]) for each in events]
        assert [each["event"] for each in events] == [each["type"] for each in content]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [each["type"] for each in content] == ["message_start", *block, *block, "message_delta", "message_stop"]
        assert content[0]["message"]["content"] == []
        assert content[2]["delta"] == {"type": "text_delta", "text": "I add."}
        assert content[4]["content_block"] == {**USED, "input": {}}
        assert json.loads(content[5]["delta"]["partial_json"]) == USED["input"]
        assert content[7]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}

    texts(played(agent, says(f"I add.{CALL}")))


def test_a_response_has_items_that_come_back_as_they_were_given_in_whatever_form_clients_keep_them():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        first = await response(endpoint, QUESTION["content"], tools=[ADD_FUNCTION])
        said, called = first["output"]
        assert (said["content"][0]["text"], called["arguments"]) == ("I add.", '{"of": [2, 2]}')
        assert len({said["id"], called["id"], first["id"]}) == 3
        # Ids and empty lists may be left out, JSON may be written otherwise.
        kept = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]}
        called = {**CALLED, "arguments": '{"of":[2,2]}'}
        second = await response(endpoint, [QUESTION, kept, called, OUTPUT], tools=[ADD_FUNCTION])
        assert (second["status"], second["usage"]["output_tokens"]) == ("completed", 5)

    (text,) = texts(played(agent, says(f"I add.{CALL}", "four"), tools=[TOOL]))
    history = [QUESTION, as_answer(f"I add.{CALL}"), {"role": "tool", "content": "4"}]
    assert text == hermes(history, [TOOL], True) + f"four{END_TEXT}"


def test_instructions_and_messages_of_developers_are_system_messages():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        items = [{"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]}, QUESTION]
        await response(endpoint, items, instructions="be short")

    said = [{"role": "system", "content": each} for each in ("be short", "be kind")]
    assert texts(played(agent, says("4"))) == [hermes([*said, QUESTION], [], True) + f"4{END_TEXT}"]


def test_a_stream_of_a_response_has_its_items_in_numbered_events():
    async def agent(endpoint: AgentEndpoint, session: Session) -> None:
        body = {"input": [QUESTION], "tools": [ADD_FUNCTION], "stream": True}
        answer = await post(endpoint, "responses", body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert [each["type"].removeprefix("response.") for each in events] == [
            *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
            *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
        ]
        assert events[4]["delta"] == events[5]["text"] == events[6]["part"]["text"] == "I add."
        assert events[8]["item"]["arguments"] == ""
        assert {each["item_id"] for each in events[9:11]} == {events[8]["item"]["id"]}
        assert [events[7]["item"], events[11]["item"]] == events[-1]["response"]["output"]

    texts(played(agent, says(f"I add.{CALL}")))
