"""A model that starts from nothing, as a Hugging Face directory. Runs in the controller, before a trainer reads it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moerl.config.architecture import architecture_config
from moerl.config.schema import ArchitectureConfig
from moerl.contract.tokenizer import Tokenizer, num_ids
from moerl.trainer.hf_directory import new_directory

VOCAB_MULTIPLE = 8
"""The embedding is padded to a multiple of this, so that tensor parallelism can split it."""


def build_model(architecture: ArchitectureConfig, tokenizer: Tokenizer, seed: int, folder: Path) -> None:
    """Writes a freshly initialised Qwen3-MoE and its tokenizer; the folder appears whole, with its seal, or not at
    all."""
    torch.manual_seed(seed)
    vocab_size = -(-num_ids(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    config = Qwen3MoeConfig.from_dict(architecture_config(architecture, vocab_size=vocab_size) | ids)
    with new_directory(folder) as partial:
        Qwen3MoeForCausalLM(config).float().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
