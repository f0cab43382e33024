"""Models whose dumps faults are planted in: random weights in bfloat16, three architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from planted_faults import VOCAB
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig

_COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}


def _qwen3_moe(**shape: int) -> PreTrainedConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3MoeConfig(**heads, **shape, **_COMMON)  # pyright: ignore[reportArgumentType]


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "8 layers x 32 experts": lambda: _qwen3_moe(
        hidden_size=48, num_hidden_layers=8, moe_intermediate_size=24, num_experts=32, num_experts_per_tok=4
    ),
    "the demo's shape": lambda: _qwen3_moe(
        hidden_size=64, num_hidden_layers=4, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
    ),
    "MLA, one dense layer": lambda: DeepseekV3Config(
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        routed_scaling_factor=1.5,
        **_COMMON,  # pyright: ignore[reportArgumentType]
    ),
}


def write_model(folder: Path, name: str, seed: int = 0, *, drift: float = 0.0) -> Path:
    """A random model in bfloat16; with `drift`, with noise of this relative size."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(MODELS[name]())
    if drift:
        torch.manual_seed(seed + 1000)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += drift * parameter.std() * torch.randn_like(parameter)
    model.bfloat16().save_pretrained(folder)
    return folder
