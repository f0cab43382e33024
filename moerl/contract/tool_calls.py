"""Tool calls in a policy's text, in the form that the chat template of its model writes.

No table of models: a template is given a conversation with a call, and what it writes around the JSON of the call is
what a policy of that model writes, too.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from moerl.contract.episodes import Message
from moerl.errors import ConfigError, EpisodeError

_NAME, _KEY, _VALUE, _TEXT = "probe_name", "probe_key", "probe_value", "probe text"


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)

Render = Callable[[Sequence[Message], Sequence[Message], bool], Awaitable[str]]
"""Writes messages as `Session.render` does."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """Arguments by name; plain JSON data."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Text around the JSON of calls, without the white space at its ends, and the names in that JSON."""

    before: str
    """Text in front of a call; empty if an answer with a call is nothing else."""
    behind: str
    """Text behind a call, may be empty."""
    name: str
    """Key of the tool's name."""
    arguments: str
    """Key of the arguments."""

    @classmethod
    async def of(cls, render: Render, tools: Sequence[Message]) -> ToolFormat:
        """Asks a template.

        Raises:
            EpisodeError: it writes no calls, or not as JSON.
            ConfigError: the model has no template, or it fails on plain messages.
        """
        question = {"role": "user", "content": _TEXT}
        called = {"name": _NAME, "arguments": {_KEY: _VALUE}}
        calls = [{"id": "call00000", "type": "function", "function": called}]
        plain = await render([question, {"role": "assistant", "content": _TEXT}], tools, False)
        end = plain.rpartition(_TEXT)[2]
        start = await render([question], tools, True)
        for content in (_TEXT, ""):
            try:
                text = await render(
                    [question, {"role": "assistant", "content": content, "tool_calls": calls}], tools, False
                )
            except ConfigError:
                continue  # some templates take a text or calls
            found = _find(text)
            if found is not None:
                at, behind, name, arguments = found
                opening = text[:at].rpartition(_TEXT)[2] if content else text[:at].removeprefix(start)
                return cls(opening.strip(), text[behind:].removesuffix(end).strip(), name, arguments)
        raise EpisodeError(
            "episode: the chat template has no form of tool calls that can be read",
            seen="no JSON object with the name and the arguments of a call",
            expected="calls as JSON, as the templates of Qwen, Hermes, Llama and Mistral write them",
            remedy="take a model or a template with such calls, or describe the tools in the prompt",
        )

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Returns a policy's text without its calls, and the calls. A call that is not whole or no valid JSON stays in
        the text."""
        content, calls, at = list[str](), list[ToolCall](), 0
        while at < len(text):
            start = text.find(self.before, at) if self.before else (0 if at == 0 else -1)
            if start < 0:
                break
            found, end = self._calls(text, start + len(self.before))
            if found and (self.before or not text[end:].strip()):
                content.append(text[at:start])
                calls += found
            else:
                end = max(start + len(self.before), at + 1)
                content.append(text[at:end])
            at = end
        content.append(text[at:])
        return ("".join(content).strip() if calls else text), calls

    def num_broken(self, content: str) -> int:
        """Counts the calls that begin in a text that `parse` has returned: none of them could be read. 0 if nothing
        marks the beginning of a call."""
        return content.count(self.before) if self.before else 0

    def _calls(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """Returns the calls from a place on, and the end of the text behind them; none if one cannot be read."""
        calls: list[ToolCall] = []
        while True:
            at = _skip(text, at, " \t\r\n," if calls else " \t\r\n")
            if calls and not text.startswith("{", at):
                break
            call, at = self._call(text, at)
            if call is None:
                return [], at
            calls.append(call)
        if not text.startswith(self.behind, at):
            return [], at
        return calls, at + len(self.behind)

    def _call(self, text: str, at: int) -> tuple[ToolCall | None, int]:
        try:
            value, end = _DECODER.raw_decode(text, at)
            json.dumps(value, ensure_ascii=False).encode()  # halves of characters are none
        except (ValueError, RecursionError):
            return None, at
        if not isinstance(value, dict):
            return None, at
        written = cast("dict[str, Any]", value)
        name, arguments = written.get(self.name), _mapping(written.get(self.arguments, {}))
        return (None if not isinstance(name, str) or arguments is None else ToolCall(name, arguments)), end


def _mapping(value: object) -> dict[str, Any] | None:
    """Returns arguments, which some templates write as a text with JSON; None if they are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_no_number)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _find(text: str) -> tuple[int, int, str, str] | None:
    """Returns start and end of the probe's call in a text, and its two keys."""
    at = text.rfind("{", 0, max(text.rfind(_NAME), 0))
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            value, end = None, at
        if isinstance(value, dict):
            written = cast("dict[str, object]", value)
            name = next((key for key, each in written.items() if each == _NAME), None)
            arguments = next((key for key, each in written.items() if _mapping(each) == {_KEY: _VALUE}), None)
            if name is not None and arguments is not None:
                return at, end, name, arguments
        at = text.rfind("{", 0, at)
    return None


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
