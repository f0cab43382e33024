"""Messages of a chat, as rows hold them: checked, and made plain. Pure functions; any process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moerl.contract.ports import Chat
from moerl.telemetry.terminal import excerpt

ROLES = ("system", "developer", "user", "assistant", "tool")
_ASKS = ("user", "tool")
"""Roles that an answer may follow."""


class MessagesError(ValueError):
    """Messages that cannot be a prompt.

    Args:
        seen, expected: for the message of the error.
    """

    def __init__(self, seen: str, expected: str) -> None:
        super().__init__(seen, expected)
        self.seen, self.expected = seen, expected


def read_chat(value: list[Any], tools: object, system: str | None) -> tuple[Chat, str | None]:
    """Returns messages as a chat that ends with a question, and the answer behind it, None if the row has none.

    Args:
        value: messages in their order.
        tools: None, a list of JSON schemas, or a JSON text of one.
        system: text put first if the messages have no system message; None = none is put.

    Raises:
        MessagesError: There are no messages, one has no known role or no text, or nothing is asked.
    """
    messages = [_message(number, each) for number, each in enumerate(value)]
    answer = None
    if messages and messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"]
    if not messages or messages[-1]["role"] not in _ASKS:
        seen = f"the last message before the answer is of the role {messages[-1]['role']!r}" if messages else "none"
        raise MessagesError(seen, f"messages, the last of a role of {', '.join(_ASKS)}")
    if system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    return Chat(tuple(messages), _tools(tools)), answer


def chat_key(chat: Chat) -> str:
    """Returns a text that equal chats share."""
    return json.dumps([chat.messages, chat.tools], sort_keys=True, ensure_ascii=False)


def _message(number: int, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise MessagesError(f"message {number} is {excerpt(repr(value), 80)}", "a mapping with role and content")
    # Arrow fills in keys that only other messages have.
    message = {str(key): each for key, each in value.items() if each is not None}
    role = message.get("role")
    if role not in ROLES:
        hint = " (from and value instead of role and content)" if "from" in message else ""
        raise MessagesError(
            f"message {number} has the role {excerpt(repr(role), 40)}{hint}", f"one of {', '.join(ROLES)}"
        )
    content = message.setdefault("content", "")
    if not isinstance(content, str):
        raise MessagesError(
            f"message {number} has the content {excerpt(repr(content), 80)}",
            "a text; images and other parts are not supported",
        )
    if not content.strip() and not message.get("tool_calls"):
        raise MessagesError(f"message {number} of the role {role!r} is empty", "a text")
    return message


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise MessagesError(f"tools that are no JSON: {error}", "a list of JSON schemas") from error
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise MessagesError(f"tools {excerpt(repr(value), 80)}", "a list of JSON schemas")
    return tuple(_without_nulls(each) for each in value)


def _without_nulls(value: Any) -> Any:
    """Returns a value without the nulls that Arrow fills in."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
