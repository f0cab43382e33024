"""The sizes of a model that parallel sizes and lengths must fit, of a model to build or of a directory. Any process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.config.trainable import refuse_untrainable
from moerl.contract.spec import spec_from_hf_config
from moerl.errors import ConfigError

if TYPE_CHECKING:
    from moerl.config.schema import ArchitectureConfig


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """origin: where the sizes stand: ``model.architecture``, or the path of a config.json. max_positions: tokens."""

    origin: str
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    max_positions: int


def architecture_sizes(architecture: ArchitectureConfig) -> ModelSizes:
    """The sizes of a model to build."""
    return ModelSizes(
        "model.architecture",
        architecture.num_attention_heads,
        architecture.num_key_value_heads,
        architecture.num_experts,
        architecture.max_positions,
    )


def directory_sizes(folder: Path) -> ModelSizes:
    """The sizes of a Hugging Face directory, read from its config.json.

    Raises:
        ConfigError: There is no such file, it is not a model that can be trained, or a size is missing.
    """
    file = folder / "config.json"
    values = _read(file)
    try:
        num_experts = spec_from_hf_config(values).num_experts
        refuse_untrainable(values)
    except ConfigError as error:
        raise ConfigError(
            f"model.path: {file}: {error.what}", seen=error.seen, expected=error.expected, remedy=error.remedy
        ) from error
    heads, max_positions = values["num_attention_heads"], values.get("max_position_embeddings")
    if not isinstance(max_positions, int) or max_positions < 1:
        raise ConfigError(
            f"model.path: {file}: max_position_embeddings",
            seen=max_positions,
            expected="an integer of at least 1",
            remedy="correct the model's config.json",
        )
    return ModelSizes(str(file), heads, values["num_key_value_heads"], num_experts, max_positions)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(
            "model.path: not a Hugging Face model directory",
            seen=file.parent,
            expected="a directory with config.json",
            remedy="give the directory that holds config.json and the weights",
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unreadable(file, str(error)) from error
    if not isinstance(values, dict):
        raise _unreadable(file, f"a JSON {type(values).__name__}")
    return values


def _unreadable(file: Path, seen: str) -> ConfigError:
    return ConfigError(
        f"model.path: {file} cannot be read", seen=seen, expected="a JSON object", remedy="restore the file"
    )
