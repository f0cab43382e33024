from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

MakeModel = Callable[..., Qwen3MoeForCausalLM]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Makes every test in this folder compute with one thread."""


@pytest.fixture
def make_model() -> MakeModel:
    """Builds a random Qwen3-MoE of three layers, the second of them dense; keyword arguments go to its config."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen3MoeForCausalLM:
        sizes: dict[str, Any] = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "max_position_embeddings": 96,
            "initializer_range": 0.2,
        }
        torch.manual_seed(seed)
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | changes)))
        return model.to(dtype).eval()

    return make
