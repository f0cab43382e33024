"""A tokenizer for episodes of tests: a character is a token of a small vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from moerl.episodes.play import Texts


def _encode(text: str) -> list[int]:
    return [4 + ord(character) % 50 for character in text]


def _decode(ids: Sequence[int]) -> str:
    return "".join(chr(64 + number) for number in ids)


TEXTS = Texts(_encode, _decode)
