"""A tokenizer for episodes of tests: a character is a token of a small vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from moerl.contract.episodes import Message
from moerl.episodes.session import Texts


def _encode(text: str) -> list[int]:
    return [4 + ord(character) % 50 for character in text]


def _decode(ids: Sequence[int]) -> str:
    return "".join(chr(64 + number) for number in ids)


def _render(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    """A template that loses nothing: ChatML in short, with `.` as the end of a turn."""
    text = "".join(f"[{each['name']}]" for each in tools)
    text += "".join(f"<{each['role'][0]}>{each['content']}.\n" for each in messages)
    return text + ("<a>" if ask else "")


TEXTS = Texts(_encode, _decode, _render)
