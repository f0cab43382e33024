"""Tokens that end a response: all that any file of a model directory names. Every engine gets all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moerl.contract.tokenizer import Tokenizer
from moerl.errors import ConfigError
from moerl.orchestration.templates import FailedTemplateError, request_of, write_once
from moerl.reading import read_json

_FILES = ("generation_config.json", "config.json")
_ANSWER = "moerl-answer"


def read_ends(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a response, each once: the tokenizer's, then those of `eos_token_id` (a
    number or a list) in `generation_config.json`, in which chat models name the end of a turn, and in `config.json`;
    then the special token that the chat template writes after an answer.

    The first is the end that demonstrations teach.

    Args:
        vocab_size: number of ids that can be sampled.

    Raises:
        ConfigError: no token is named, so no response could ever stop; a file cannot be read; or an id is no token.
    """
    ends: list[int] = []
    for place, end in _named(folder, tokenizer):
        if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < vocab_size:
            raise ConfigError(
                f"{folder / place}: eos_token_id is not a token of the vocabulary",
                seen=repr(end),
                expected=f"an id in [0, {vocab_size}), or a list of them",
                remedy="correct the file: a response would never end there",
            )
        ends += [] if end in ends else [end]
    if not ends:
        raise ConfigError(
            f"{folder} names no token that ends a response",
            seen="no eos_token in tokenizer_config.json, no eos_token_id in " + " or ".join(_FILES),
            expected="an id",
            remedy="set eos_token in the model's tokenizer_config.json",
        )
    return tuple(ends)


def describe_ends(ends: tuple[int, ...], tokenizer: Tokenizer) -> str:
    """Returns one line for the user."""
    names = [f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ends]
    return "a response ends with " + " or ".join(names)


def _named(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, Any]]:
    """Yields every end with the file that names it."""
    end = getattr(tokenizer, "eos_token_id", None)  # transformers computes it as it is asked for
    if end is not None:
        yield "tokenizer_config.json", end
    for name in _FILES:
        ends = _read(folder / name).get("eos_token_id")
        for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            yield name, end
    turn_end = _turn_end(tokenizer)
    if turn_end is not None:
        yield "chat_template", turn_end


def _turn_end(tokenizer: Tokenizer) -> int | None:
    """Returns the special token that the chat template writes after an answer; None if it writes none, or fails on a
    question with an answer."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = write_once(request_of(tokenizer, messages, ask=False))
    except FailedTemplateError:
        return None
    after = tokenizer.encode(text.rpartition(_ANSWER)[2], add_special_tokens=False)
    return after[0] if after and after[0] in tokenizer.added_tokens_decoder else None


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a file of settings; an empty dictionary if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(type(content).__name__)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read", seen=error, expected="a JSON object", remedy="restore the file"
        ) from error
    return content
