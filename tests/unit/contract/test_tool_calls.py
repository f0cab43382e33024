"""Calls are read in the form that a model's own template writes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest
from chat_streams import hermes

from moerl.contract.episodes import Message
from moerl.contract.tool_calls import ToolCall, ToolFormat
from moerl.errors import ConfigError, EpisodeError

Template = Callable[[Sequence[Message], Sequence[Message], bool], str]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def with_thinking(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    """Puts empty thinking before the last answer, as Qwen3 does."""
    return hermes(messages, tools, ask).replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def llama(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    """An answer is a text or one call, under the name `parameters`."""
    text = "".join(f"<|tools|>{json.dumps(each)}<|eot|>" for each in tools)
    for message in messages:
        calls = message.get("tool_calls", ())
        if calls and message["content"]:
            raise ConfigError("the template fails: a text beside a call")
        called = [{"name": each["function"]["name"], "parameters": each["function"]["arguments"]} for each in calls]
        text += f"<|{message['role']}|>\n\n{json.dumps(called[0]) if called else message['content']}<|eot|>"
    return text + ("<|assistant|>\n\n" if ask else "")


def mistral(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    """All calls of an answer in one list behind a token, each with its id."""
    text = f"[TOOLS] {json.dumps(list(tools))}[/TOOLS]" if tools else ""
    for message in messages:
        calls = [{**each["function"], "id": each["id"]} for each in message.get("tool_calls", ())]
        text += f"[{message['role']}] {message['content']}" + (f"[TOOL_CALLS] {json.dumps(calls)}" if calls else "")
        text += "</s>"
    return text


def as_text(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    """Arguments are a text with JSON."""
    changed = []
    for message in messages:
        functions = [dict(call["function"]) for call in message.get("tool_calls", ())]
        calls = [{"function": {**each, "arguments": json.dumps(each["arguments"])}} for each in functions]
        changed.append({**message, "tool_calls": calls})
    return hermes(changed, tools, ask)


def xml(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    calls = [f"<function={c['function']['name']}></function>" for m in messages for c in m.get("tool_calls", ())]
    return hermes([{"role": m["role"], "content": m["content"]} for m in messages], tools, ask) + "".join(calls)


def format_of(template: Template) -> ToolFormat:
    async def render(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        return template(messages, tools, ask)

    return asyncio.run(ToolFormat.of(render, TOOLS))


CALL = {"name": "add", "arguments": {"a": 1, "text": "} </tool_call>"}}
ADD = ToolCall("add", {"a": 1, "text": "} </tool_call>"})


@pytest.mark.parametrize("template", [hermes, with_thinking, as_text])
def test_calls_in_tags_stand_apart_from_the_text(template: Template):
    form = format_of(template)
    assert (form.before, form.behind, form.name, form.arguments) == ("<tool_call>", "</tool_call>", "name", "arguments")
    one = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    assert form.parse(f"I add.\n{one}\n{one} Done.") == ("I add.\n\n Done.", [ADD, ADD])


def test_calls_in_a_list_behind_a_token_are_read():
    form = format_of(mistral)
    assert (form.before, form.behind) == ("[TOOL_CALLS] [", "]")
    calls = json.dumps([{**CALL, "id": "x"}, {**CALL, "id": "y"}])
    assert form.parse(f"[TOOL_CALLS] {calls}") == ("", [ADD, ADD])


def test_an_answer_that_is_a_call_and_nothing_else_is_read():
    form = format_of(llama)
    assert (form.before, form.behind, form.arguments) == ("", "", "parameters")
    call = json.dumps({"name": "add", "parameters": {"a": 1}})
    assert form.parse(f"\n{call}\n") == ("", [ToolCall("add", {"a": 1})])
    assert form.parse(f"I add: {call}") == (f"I add: {call}", [])
    assert form.parse(f"{call} and so on") == (f"{call} and so on", [])


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "",
        " spaces stay ",
        "<tool_call>\n{",
        '<tool_call>\n{"name": "add", "arguments": {}}',
        "<tool_call>\nnull\n</tool_call>",
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        "<tool_call>" * 5,
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_what_is_no_whole_call_stays_in_the_text(text: str):
    assert format_of(hermes).parse(text) == (text, [])


def test_a_call_behind_one_that_is_broken_is_read_and_the_broken_one_is_kept():
    text, calls = format_of(hermes).parse(f"<tool_call>\n{{\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
    assert (text, calls) == ("<tool_call>\n{", [ADD])


def test_calls_that_could_not_be_read_are_counted_if_something_marks_their_beginning():
    form = format_of(hermes)
    text, calls = form.parse(f"<tool_call>\n{{\n<tool_call>\n{json.dumps(CALL)}\n</tool_call> <tool_call>")
    assert (form.num_broken(text), len(calls)) == (2, 1)
    assert form.num_broken("no call") == 0
    assert format_of(llama).num_broken('{"name": ') == 0


def test_a_call_without_arguments_has_none():
    assert format_of(hermes).parse('<tool_call>{"name": "now"}</tool_call>') == ("", [ToolCall("now", {})])


def test_a_template_whose_calls_are_no_json_is_refused_by_name():
    with pytest.raises(EpisodeError, match="no form of tool calls that can be read"):
        format_of(xml)
