"""The section `model`: its rules, its description, and the Hugging Face config of a model to build. Any process."""

from __future__ import annotations

from typing import Any

from moerl.config.schema import ArchitectureConfig, ModelConfig
from moerl.errors import ConfigError
from moerl.models.description import ModelDescription, describe, read_model


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


def describe_model(model: ModelConfig) -> ModelDescription:
    """Describes the model to build, or that of the directory to start from. Raises `ConfigError` as `read_model`."""
    if model.architecture is not None:
        return describe_architecture(model.architecture)
    assert model.path is not None
    return read_model(model.path)


def check_model(model: ModelConfig) -> None:
    """Checks the rules between the keys of the section. Raises `ConfigError` at the first that is broken."""
    if (model.path is None) == (model.architecture is None):
        raise ConfigError(
            "model.path and model.architecture: one of them must be given",
            seen="neither" if model.path is None else "both",
            expected="one; the other null",
            remedy="use model=pretrained model.path=DIR to start from a directory, or model=laptop to build one",
        )
    if (model.hub is None) != (model.commit is None) or (model.hub is not None and model.path is None):
        raise ConfigError(
            "model.hub and model.commit: set by a run, both together and with the directory",
            seen=f"model.hub = {model.hub}, model.commit = {model.commit}, model.path = {model.path}",
            expected="none of them, or all as a run stored them",
            remedy="give a model of the hub as model.path=OWNER/NAME or model.path=OWNER/NAME@REVISION",
        )
    if model.path is not None and model.tokenizer is not None:
        raise ConfigError(
            "model.tokenizer: the model of model.path has one",
            seen=model.tokenizer,
            expected="null, or a model to build (model.architecture)",
            remedy="leave model.tokenizer away; a changed tokenizer goes into the directory of the model",
        )
    architecture = model.architecture
    if architecture is None:
        return
    if architecture.experts_per_token > architecture.num_experts:
        raise ConfigError(
            "model.architecture.experts_per_token: more than there are experts",
            seen=architecture.experts_per_token,
            expected=f"<= model.architecture.num_experts = {architecture.num_experts}",
            remedy="lower experts_per_token or raise num_experts",
        )
    if architecture.num_attention_heads % architecture.num_key_value_heads:
        raise ConfigError(
            "model.architecture.num_attention_heads: not a multiple of num_key_value_heads",
            seen=architecture.num_attention_heads,
            expected=f"a multiple of {architecture.num_key_value_heads}",
            remedy="change one of the two",
        )
    if architecture.head_dim % 2:
        raise ConfigError(
            "model.architecture.head_dim: rotary embeddings need an even width",
            seen=architecture.head_dim,
            expected="an even number",
            remedy=f"set model.architecture.head_dim={architecture.head_dim + 1}",
        )
