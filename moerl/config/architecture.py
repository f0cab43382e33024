"""A model to build, as the Hugging Face config that it will have. Pure; any process."""

from __future__ import annotations

from typing import Any

from moerl.config.schema import ArchitectureConfig
from moerl.models.description import ModelDescription, describe


def architecture_config(architecture: ArchitectureConfig, *, vocab_size: int) -> dict[str, Any]:
    """Returns the config of a Qwen3-MoE without dense layers."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.moe_intermediate_size * architecture.experts_per_token,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        "head_dim": architecture.head_dim,
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
        "moe_intermediate_size": architecture.moe_intermediate_size,
        "max_position_embeddings": architecture.max_positions,
        "initializer_range": architecture.initializer_range,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
    }


def describe_architecture(architecture: ArchitectureConfig) -> ModelDescription:
    """Describes the model, with the largest vocabulary that it may have."""
    return describe(architecture_config(architecture, vocab_size=architecture.vocab_size), "model.architecture")
