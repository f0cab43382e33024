"""Answers with tools: the policy calls them in the form of its model's own chat template, and reads their results.

    policy       answers; an answer with calls goes on
    loop         reads the calls, and has all of one answer run side by side
    policy       reads one message `tool` for each call, in their order, broken calls last, and answers again

The policy may be wrong, and reads so: a call of an unknown tool, arguments that break its schema, a tool that raises
and a call above the limit get a text as their result. Runs in the event loop of the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from moerl.contract.conversation import Conversation
from moerl.contract.episodes import Message, SampledTurn, Session
from moerl.contract.ports import Chat, Prompt
from moerl.contract.tool_calls import ToolCall, ToolFormat
from moerl.errors import ConfigError, EpisodeError, MoerlError
from moerl.tasks.rewards.schemas import mistake, validator

MAX_RESULT_CHARACTERS = 20_000
"""Most characters of a result that the policy reads; of a longer one it reads both ends."""
_MAX_ERROR_CHARACTERS = 300
_BROKEN = "the call could not be read: its JSON is not whole, or has no name or arguments"


class ToolCallError(Exception):
    """Failure of a call, whose text the policy reads as it stands. It is raised by a tool."""


@runtime_checkable
class Tool(Protocol):
    """Something that a policy can call. Calls of one answer overlap."""

    @property
    def schema(self) -> Message:
        """Schema as requests of OpenAI's API have it: `type` is `function`, and `function` has `name`, `description`
        and `parameters`, a JSON schema of an object."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns the text that the policy reads.

        Whatever it raises is read by the policy, too, and counts as a failed call. A `MoerlError` ends the episode,
        which is refused: raise it if the machine is to blame and not the call.

        Args:
            arguments: meet the schema.
        """
        ...


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """End of a talk with tools."""

    turn: SampledTurn
    """Last answer of the policy."""
    text: str
    """Its text without calls."""
    is_final: bool
    """True if it has no call; False if a limit or the end of the session came first."""
    num_turns: int
    """Answers of the policy."""
    num_calls: int
    """Calls that were answered, failed ones included."""
    num_failed: int
    """Calls whose result was an error."""

    @property
    def rewards(self) -> dict[str, float]:
        """Numbers of calls under the names that the metrics of tasks have: `tool_calls`, `failed_calls`."""
        return {"tool_calls": float(self.num_calls), "failed_calls": float(self.num_failed)}


async def conversation_with(prompt: Prompt, session: Session, tools: Sequence[Tool]) -> Conversation:
    """Returns a conversation whose policy knows the tools: that of the episode's session if its prompt was written with
    them, else another one of the episode. Their schemas then count towards `rollout.max_new_tokens`.

    Raises:
        EpisodeError: the prompt has no messages, or the schemas leave no room to sample.
        ConfigError: the template fails on the tools.
    """
    if prompt.chat is None or not tools or prompt.chat.tools:
        return Conversation.of(prompt, session)
    schemas = tuple(dict(each.schema) for each in tools)
    return await Conversation.opened(session, Chat(prompt.chat.messages, schemas))


async def answer_with_tools(chat: Conversation, tools: Sequence[Tool], *, max_calls: int, max_turns: int) -> ToolAnswer:
    """Has the policy answer, and call tools, until an answer has no call.

    Args:
        chat: was written with the schemas of `tools`, and waits for an answer.
        max_calls: calls that are carried out; further ones get an error.
        max_turns: answers of the policy; calls of the last one are not carried out.

    Raises:
        EpisodeError: the conversation has other tools, or its template writes no calls that can be read; or a tool
            raised it.
        ConfigError: a tool has a schema that is none.
    """
    box = _ToolBox(chat, tools, max_calls)
    written = await ToolFormat.of(chat.session.render, chat.tools) if tools else None
    num_turns = 0
    while True:
        turn = await chat.sample()
        num_turns += 1
        text, calls = (turn.text, []) if written is None else written.parse(turn.text)
        num_broken = 0 if written is None else written.num_broken(text)
        chat.session.count_calls(len(calls) + num_broken)
        is_final = not calls and not num_broken
        is_last = is_final or num_turns >= max_turns or chat.session.is_over
        if not is_last:
            await chat.observe(*await box.carry_out(calls, num_broken))
        if is_last or chat.session.is_over:
            return ToolAnswer(turn, text, is_final, num_turns, box.num_calls, box.num_failed)


class _ToolBox:
    """Tools of a conversation by name, and the numbers of calls so far."""

    def __init__(self, chat: Conversation, tools: Sequence[Tool], max_calls: int) -> None:
        self._tools = {_name(each.schema): each for each in tools}
        self._validators = {_name(each.schema): _validator(each.schema) for each in tools}
        self._max_calls = max_calls
        self.num_calls, self.num_failed = 0, 0
        known = sorted(map(_name, chat.tools))
        if known != sorted(self._tools):
            raise EpisodeError(
                "episode: the conversation has other tools",
                seen=", ".join(known) or "none",
                expected=", ".join(sorted(self._tools)) or "none",
                remedy="begin it by moerl.tasks.tools.loop.conversation_with, with the same tools",
            )

    async def carry_out(self, calls: Sequence[ToolCall], num_broken: int) -> list[Message]:
        """Returns one message for each call, those of broken calls last. Raises the first error that ends the episode,
        once all calls have ended."""
        first, self.num_calls = self.num_calls, self.num_calls + len(calls) + num_broken
        running = (self._result(first + i, call) for i, call in enumerate(calls))
        results: list[Message] = []
        for call, text in zip(calls, await asyncio.gather(*running, return_exceptions=True), strict=True):
            if isinstance(text, BaseException):
                raise text
            results.append({"role": "tool", "name": call.name, "content": text})
        results += [{"role": "tool", "content": self._failed(_BROKEN)} for _ in range(num_broken)]
        # Some templates require ids of nine letters and digits.
        return [{**each, "tool_call_id": f"call{first + i:05d}"} for i, each in enumerate(results)]

    async def _result(self, number: int, call: ToolCall) -> str:
        """Returns the text that the policy reads as the result of a call. number: of the call, from 0."""
        if number >= self._max_calls:
            return self._failed(f"no call is left: all {self._max_calls} are used")
        tool = self._tools.get(call.name)
        if tool is None:
            return self._failed(f"there is no tool {call.name[:80]!r}, but {', '.join(self._tools)}")
        try:
            wrong = mistake(self._validators[call.name], call.arguments)
            if wrong is not None:
                return self._failed(f"arguments{wrong}"[:_MAX_ERROR_CHARACTERS])
            return _cut(await tool.call(call.arguments))
        except MoerlError:
            raise
        except ToolCallError as error:
            return self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - code of users, whose errors the policy reads
            return self._failed(f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS])

    def _failed(self, text: str) -> str:
        self.num_failed += 1
        return _cut(f"error: {text}")


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Message:
    """Returns the schema of a tool, as `Tool.schema` has it. parameters: JSON schema of an object."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _name(schema: Message) -> str:
    return str(schema.get("function", schema).get("name"))


def _validator(schema: Message) -> Any:
    try:
        return validator(schema["function"].get("parameters", {}))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the tool {_name(schema)} has a schema that cannot be used",
            seen=str(error),
            expected="type: function, and function with name, description and parameters, a JSON schema",
            remedy="correct the schema of the tool",
        ) from error


def _cut(text: str) -> str:
    """Returns both ends of a text that is too long."""
    left_out = len(text) - MAX_RESULT_CHARACTERS
    half = MAX_RESULT_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
