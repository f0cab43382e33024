"""Hugging Face model directories: built from an architecture, and read for tokenizers and the embedded engine."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moerl.config.architecture import architecture_config
from moerl.config.schema import ArchitectureConfig, ModelConfig
from moerl.contract.ports import Task
from moerl.errors import ConfigError
from moerl.machine.model_files import check_tokenizer
from moerl.models.description import ModelDescription
from moerl.orchestration.tokenizer import make_tokenizer, num_ids
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_sampler
from moerl.trainer.hf_directory import new_directory

VOCAB_MULTIPLE = 8
"""The embedding is padded to a multiple of this, so that tensor parallelism can split it."""


def build_model(architecture: ArchitectureConfig, tokenizer: PreTrainedTokenizerBase, seed: int, folder: Path) -> None:
    """Writes a freshly initialised Qwen3-MoE and its tokenizer; the folder appears whole, with its seal, or not at
    all."""
    torch.manual_seed(seed)
    vocab_size = -(-num_ids(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    config = Qwen3MoeConfig.from_dict(architecture_config(architecture, vocab_size=vocab_size) | ids)
    with new_directory(folder) as partial:
        Qwen3MoeForCausalLM(config).float().save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def new_tokenizer(model: ModelConfig, task: Task) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model to build: that of `model.tokenizer`, or one trained on the texts of the task.

    Raises:
        ConfigError: the tokenizer cannot be read, has more ids than the model may have, or names no end of a response.
    """
    assert model.architecture is not None
    limit = model.architecture.vocab_size
    if model.tokenizer is None:
        return make_tokenizer(task, limit)
    tokenizer = read_tokenizer(model.tokenizer, "model.tokenizer")
    ids = num_ids(tokenizer)
    if ids > limit:
        raise ConfigError(
            "model.tokenizer: more ids than the model may have",
            seen=f"ids up to {ids - 1} in {model.tokenizer}",
            expected=f"at most model.architecture.vocab_size = {limit} ids",
            remedy=f"set model.architecture.vocab_size={ids} or more",
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model.tokenizer: it names no token that ends a response",
            seen=f"no eos_token in {model.tokenizer / 'tokenizer_config.json'}",
            expected="the token that demonstrations end with",
            remedy="set eos_token there",
        )
    return tokenizer


def read_tokenizer(folder: Path, key: str = "model.path") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a directory.

    Args:
        key: the key that names the directory, for messages.

    Raises:
        ConfigError: the directory has no tokenizer that can be read.
    """
    check_tokenizer(folder, key)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises whatever its parsers do, plain `Exception` too
        raise ConfigError(
            f"{key}: {folder}: the tokenizer cannot be read",
            seen=" ".join(f"{type(error).__name__}: {error}".split())[:500],
            expected="a tokenizer that transformers reads",
            remedy="copy the files of the tokenizer into the directory again",
        ) from error


def make_engine(
    model: ModelDescription, *, dtype: str, max_running: int, version: int = -1, record_steps: bool = True
) -> EmbeddedEngine:
    """Makes an embedded engine for the model of a Hugging Face directory, on the GPU of this process if there is one.

    Args:
        version: policy version of the weights in its folder; -1 if the engine must wait for a first update.
        record_steps: value of `rollout.record_steps`.
    """
    assert model.folder is not None
    return EmbeddedEngine(
        load_sampler(model.folder, dtype),
        model.spec,
        engine_id="embedded-0",
        max_running=max_running,
        policy_version=version,
        record_steps=record_steps,
    )
