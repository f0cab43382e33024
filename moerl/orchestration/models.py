"""Hugging Face model directories: built from an architecture, read for the engine, written from an export."""

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
from moerl.config.model_files import check_tokenizer
from moerl.config.schema import ArchitectureConfig
from moerl.errors import ConfigError
from moerl.models.description import ModelDescription
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_sampler
from moerl.trainer.hf_directory import new_directory

VOCAB_MULTIPLE = 8
"""The embedding is padded to a multiple of this, so that tensor parallelism can split it."""


def build_model(architecture: ArchitectureConfig, tokenizer: PreTrainedTokenizerBase, seed: int, folder: Path) -> None:
    """Writes a freshly initialised Qwen3-MoE and its tokenizer; the folder appears whole or not at all, sealed."""
    torch.manual_seed(seed)
    vocab_size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3MoeConfig.from_dict(architecture_config(architecture, vocab_size=vocab_size) | ids)
    with new_directory(folder) as partial:
        Qwen3MoeForCausalLM(config).float().save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer stored with a model.

    Raises:
        ConfigError: there is none that can be read.
    """
    check_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises whatever its parsers do, plain `Exception` too
        raise ConfigError(
            f"model.path: {folder}: the tokenizer cannot be read",
            seen=" ".join(f"{type(error).__name__}: {error}".split())[:500],
            expected="a tokenizer that transformers reads",
            remedy="copy the tokenizer's files of the model into the directory again",
        ) from error


def make_engine(model: ModelDescription, *, dtype: str, max_running: int, version: int = -1) -> EmbeddedEngine:
    """An embedded engine for the model of a Hugging Face directory.

    Args:
        version: policy version of the weights in its folder; -1 where the engine must wait for a first update.
    """
    assert model.folder is not None
    loaded = load_sampler(model.folder, dtype)
    return EmbeddedEngine(loaded, model.spec, engine_id="embedded-0", max_running=max_running, policy_version=version)
