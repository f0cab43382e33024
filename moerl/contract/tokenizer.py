"""The tokenizer as the controller sees it, and checked encoding. Torch-free; any process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from moerl.errors import ConfigError


class Tokenizer(Protocol):
    """Tokenizer of a model, as transformers has it (`moerl.rollout.tokenizers`)."""

    chat_template: Any
    """Program that writes messages; None without one."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Special tokens by the name of their use."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens that are added to the vocabulary, special ones among them, by id."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Returns all tokens with their ids."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the ids of a text."""
        ...

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, *, clean_up_tokenization_spaces: bool
    ) -> Any:
        """Returns the text of ids."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """Returns the token of an id."""
        ...

    def get_chat_template(self, *, tools: list[dict[str, Any]] | None = None) -> Any:
        """Returns the chat template that is meant for these tools, or for none."""
        ...

    def save_pretrained(self, save_directory: Path) -> Any:
        """Writes the files of the tokenizer into a directory."""
        ...


def num_ids(tokenizer: Tokenizer) -> int:
    """Returns how many ids a model needs for a tokenizer: one more than its largest. Ids may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def encode_checked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text, without added special tokens; markup of special tokens inside the text becomes
    these tokens.

    Raises:
        ConfigError: decoding does not give the text back, so characters were dropped or changed.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # Some tokenizers normalise what they are given, by Unicode NFC for example.
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if decoded != (text if normalizer is None else normalizer.normalize_str(text)):
        lost = sorted(set(text) - set(decoded))
        raise ConfigError(
            f"the tokenizer cannot represent a text ({len(text)} characters)",
            seen=f"characters {lost} are lost" if lost else f"it decodes to {decoded[:80]!r}",
            expected=f"{text[:80]!r}",
            remedy="clean the text, or start from a model whose tokenizer knows these characters (model.path)",
        )
    return ids
