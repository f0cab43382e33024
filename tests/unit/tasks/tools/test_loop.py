"""Answers with tools: calls are read, run side by side and answered, and a policy that is wrong reads so."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_streams import END, END_TEXT, QUESTION, TEXTS, encode, hermes, says, texts
from episode_streams import check
from factories import FULL

from moerl.config.rollouts import EpisodeConfig
from moerl.contract.conversation import Conversation
from moerl.contract.episodes import Message, Session
from moerl.contract.ports import Chat, Prompt, RolloutRequest
from moerl.contract.trajectory import Lineage
from moerl.episodes.play import NO_LIMITS, Episode, PlayedEpisode, play
from moerl.episodes.session import Texts
from moerl.errors import ConfigError, EpisodeError
from moerl.tasks.tools.functions import FunctionTool
from moerl.tasks.tools.loop import (
    MAX_RESULT_CHARACTERS,
    Tool,
    ToolAnswer,
    ToolCallError,
    answer_with_tools,
    conversation_with,
)

MULTIPLY: Message = {
    "type": "function",
    "function": {
        "name": "multiply",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Multiply:
    """A tool that keeps its arguments."""

    schema: Message = MULTIPLY

    def __init__(self, result: Callable[[Mapping[str, Any]], Awaitable[str]] | None = None) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self._result = result

    async def call(self, arguments: Mapping[str, Any]) -> str:
        self.asked.append(arguments)
        return str(arguments["a"] * arguments["b"]) if self._result is None else await self._result(arguments)


def calls(*arguments: Any, name: str = "multiply") -> str:
    written = (json.dumps({"name": name, "arguments": each}) for each in arguments)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written)


ONE = calls({"a": 6, "b": 7})


def played(
    *answers: str,
    tools: Sequence[Tool],
    max_calls: int = 8,
    max_turns: int = 8,
    max_tokens: int = 4000,
    prompt_has_tools: bool = True,
    template: Callable[[Sequence[Message], Sequence[Message], bool], str] = hermes,
    limits: EpisodeConfig = NO_LIMITS,
) -> tuple[PlayedEpisode, ToolAnswer | None]:
    """Plays an episode with tools in which the policy says these answers."""
    chat = Chat((QUESTION,), tuple(each.schema for each in tools) if prompt_has_tools else ())
    prompt, found = Prompt("p", template(chat.messages, chat.tools, True), {}, chat), list[ToolAnswer]()

    async def environment(session: Session) -> Mapping[str, float]:
        talk = await conversation_with(prompt, session, tools)
        found.append(await answer_with_tools(talk, tools, max_calls=max_calls, max_turns=max_turns))
        return {"reward": 1.0, **found[0].rewards}

    request = RolloutRequest(Lineage("r0", "p", "g"), tuple(encode(prompt.text)), FULL, max_tokens, (END,))
    words = Texts(encode, TEXTS.decode, template)
    stream = says(*answers)
    (episode,) = play([Episode(request, environment)], stream, check, words, turn_seconds=300.0, limits=limits)
    return episode, found[0] if found else None


def results(episode: PlayedEpisode) -> list[str]:
    """Texts of the tools' messages, as the policy reads them."""
    (text,) = texts(episode)
    return re.findall(rf"<\|im_start\|>tool\n(.*?){re.escape(END_TEXT)}", text, re.DOTALL)


def test_a_call_is_answered_and_the_policy_goes_on_until_it_calls_nothing() -> None:
    tool = Multiply()
    episode, answer = played(f"I ask.\n{ONE}", "It is 42.", tools=[tool])
    assert answer is not None
    assert (answer.text, answer.is_final, answer.num_turns) == ("It is 42.", True, 2)
    assert tool.asked == [{"a": 6, "b": 7}]
    (record,) = episode.records
    assert record.values["rewards"] == {"reward": 1.0, "tool_calls": 1.0, "failed_calls": 0.0}
    (text,) = texts(episode)
    start = hermes([QUESTION], [tool.schema], True)
    said = f"I ask.\n{ONE}{END_TEXT}\n<|im_start|>tool\n42{END_TEXT}\n<|im_start|>assistant\nIt is 42.{END_TEXT}"
    assert text == start + said


def test_calls_of_one_answer_run_side_by_side_and_are_answered_in_their_order() -> None:
    async def once_both_run(arguments: Mapping[str, Any]) -> str:
        while len(tool.asked) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02 / arguments["a"])
        return f"result {arguments['a']}"

    tool = Multiply(once_both_run)
    episode, answer = played(calls({"a": 1, "b": 1}, {"a": 2, "b": 1}), "done", tools=[tool])
    assert results(episode) == ["result 1", "result 2"]
    assert answer is not None
    assert (answer.num_calls, answer.num_failed) == (2, 0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (calls({}, name="divide"), "error: there is no tool 'divide', but multiply"),
        (calls({"a": 6}), "error: arguments: 'b' is a required property"),
        (calls({"a": "six", "b": 7}), "error: arguments.a: 'six' is not of type 'integer'"),
        ('<tool_call>\n{"name": "multiply", "arguments": {"a": 6,\n</tool_call>', "error: the call could not be read"),
        ('<tool_call>\n{"name": "multiply", "arguments": [6, 7]}\n</tool_call>', "error: the call could not be read"),
    ],
)
def test_a_call_that_is_wrong_is_answered_so_and_the_policy_goes_on(answer: str, told: str) -> None:
    tool = Multiply()
    episode, ended = played(answer, ONE, "It is 42.", tools=[tool])
    first, second = results(episode)
    assert first.startswith(told)
    assert second == "42"
    assert ended is not None
    assert (ended.num_calls, ended.num_failed, ended.is_final) == (2, 1, True)
    assert tool.asked == [{"a": 6, "b": 7}]


def test_a_call_that_cannot_be_read_is_answered_next_to_one_that_can() -> None:
    episode, ended = played(f"<tool_call>\n{{\n{ONE}", "done", tools=[Multiply()])
    assert results(episode) == [
        "42",
        "error: the call could not be read: its JSON is not whole, or has no name or arguments",
    ]
    assert ended is not None
    assert (ended.num_calls, ended.num_failed) == (2, 1)


def test_errors_of_tools_are_read_and_those_of_the_machine_end_the_episode() -> None:
    async def raises(arguments: Mapping[str, Any]) -> str:
        raise {1: ToolCallError("no such city"), 2: KeyError("x"), 3: EpisodeError("the server is lost")}[
            arguments["a"]
        ]

    episode, ended = played(calls({"a": 1, "b": 0}, {"a": 2, "b": 0}), "done", tools=[Multiply(raises)])
    assert results(episode) == ["error: no such city", "error: KeyError: 'x'"]
    assert ended is not None
    assert ended.num_failed == 2
    refused, ended = played(calls({"a": 3, "b": 0}), "done", tools=[Multiply(raises)])
    assert refused.error is not None
    assert (ended, refused.error.seen) == (None, "the server is lost")


def test_calls_above_the_limit_are_not_carried_out_and_the_policy_reads_so() -> None:
    tool = Multiply()
    episode, ended = played(calls(*({"a": i, "b": 1} for i in range(3))), "done", tools=[tool], max_calls=2)
    assert results(episode) == ["0", "1", "error: no call is left: all 2 are used"]
    assert len(tool.asked) == 2
    assert ended is not None
    assert (ended.num_calls, ended.num_failed, ended.is_final) == (3, 1, True)


def test_calls_above_the_limit_of_the_episode_end_it() -> None:
    tool = Multiply()
    limits = EpisodeConfig(max_calls=1)
    _, ended = played(ONE, "It is 42.", tools=[tool], limits=limits)
    assert ended is not None
    assert (ended.text, len(tool.asked)) == ("It is 42.", 1)
    episode, ended = played(ONE, f"again {ONE}", "It is 42.", tools=[tool], limits=limits)
    assert ended is not None
    assert (ended.text, ended.is_final, len(tool.asked)) == ("again", False, 2)
    assert episode.stopped_by == "max_calls"


def test_calls_of_the_last_turn_are_not_carried_out() -> None:
    tool = Multiply()
    _, ended = played(ONE, f"again {ONE}", tools=[tool], max_turns=2)
    assert ended is not None
    assert (ended.text, ended.is_final, ended.num_turns, ended.num_calls) == ("again", False, 2, 1)
    assert len(tool.asked) == 1


def test_a_session_without_a_token_left_ends_the_answer() -> None:
    room = len(encode(f"{ONE}{END_TEXT}\n<|im_start|>tool\n42"))
    for max_tokens, num_calls in ((len(encode(ONE)), 0), (room, 1)):
        _, ended = played(ONE, "It is 42.", tools=[Multiply()], max_tokens=max_tokens)
        assert ended is not None
        assert (ended.is_final, ended.num_turns, ended.num_calls) == (False, 1, num_calls)


def test_of_a_long_result_the_policy_reads_both_ends() -> None:
    async def long(arguments: Mapping[str, Any]) -> str:
        return "a" * MAX_RESULT_CHARACTERS + "b" * MAX_RESULT_CHARACTERS

    episode, _ = played(ONE, "done", tools=[Multiply(long)], max_tokens=60_000)
    half = MAX_RESULT_CHARACTERS // 2
    assert results(episode) == ["a" * half + f"\n[{MAX_RESULT_CHARACTERS} characters left out]\n" + "b" * half]


def test_a_prompt_without_tools_opens_a_session_that_has_them() -> None:
    episode, ended = played(ONE, "It is 42.", tools=[Multiply()], prompt_has_tools=False)
    assert ended is not None
    assert ended.text == "It is 42."
    (text,) = texts(episode)
    assert text.startswith(hermes([QUESTION], [Multiply.schema], True))


def test_other_tools_than_those_of_the_conversation_are_refused() -> None:
    chat = Chat((QUESTION,), ({"type": "function", "function": {"name": "add"}},))
    with pytest.raises(EpisodeError, match="the conversation has other tools; seen: add; expected: multiply"):
        asyncio.run(
            answer_with_tools(Conversation(None, chat, ""), [Multiply()], max_calls=1, max_turns=1)  # type: ignore[arg-type]
        )


def test_a_schema_that_is_none_is_refused() -> None:
    broken = Multiply()
    broken.schema = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "no type"}}}
    chat = Chat((QUESTION,), (broken.schema,))
    with pytest.raises(ConfigError, match="the tool multiply has a schema that cannot be used"):
        asyncio.run(
            answer_with_tools(Conversation(None, chat, ""), [broken], max_calls=1, max_turns=1)  # type: ignore[arg-type]
        )


def test_without_tools_an_answer_is_an_answer() -> None:
    _, ended = played(ONE, tools=[])
    assert ended is not None
    assert (ended.text, ended.is_final, ended.num_calls) == (ONE, True, 0)


def test_functions_of_the_user_are_called() -> None:
    def multiply(a: int, b: int) -> int:
        """Multiplies."""
        return a * b

    episode, _ = played(ONE, "It is 42.", tools=[FunctionTool(multiply)])
    assert results(episode) == ["42"]


def test_the_environment_of_the_page_is_played() -> None:
    page = (Path(__file__).parents[4] / "docs" / "episodes.md").read_text()
    (program,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FunctionTool" in each)
    names: dict[str, Any] = {}
    exec(program, names)
    chat = Chat((QUESTION,))
    prompt = Prompt("p", hermes(chat.messages, (), True), {"answer": "42"}, chat)
    request = RolloutRequest(Lineage("r0", "p", "g"), tuple(encode(prompt.text)), FULL, 4000, (END,))
    episode = Episode(request, lambda session: names["play"](prompt, session))
    (ended,) = play([episode], says(ONE, "42"), check, TEXTS, turn_seconds=300.0)
    assert results(ended) == ["42"]
    assert ended.records[0].values["rewards"] == {"reward": 1.0, "tool_calls": 1.0, "failed_calls": 0.0}
