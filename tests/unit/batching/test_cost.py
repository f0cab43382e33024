"""Estimated cost of sequences."""

from __future__ import annotations

import pytest
from factories import hf_config

from moerl.batching.cost import SequenceCost, sequence_flops
from moerl.models.description import describe

SIZES = describe(
    hf_config(
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=3,
        num_experts_per_tok=2,
        moe_intermediate_size=5,
        vocab_size=7,
    ),
    "config.json",
)


def by_hand(num_rows: int) -> float:
    """Two operations per multiply-add, matrix by matrix."""
    query = output = 4 * (2 * 3)
    key = value = 4 * (1 * 3)
    ffn = 3 * 4 * 10
    attention = sum(2 * 2 * 3 * (row + 1) for row in range(num_rows))
    return 2 * (num_rows * (2 * (query + output + key + value + ffn) + 4 * 7) + 2 * attention)


@pytest.mark.parametrize("num_rows", [1, 50, 4000])
def test_operations_agree_with_a_count_by_hand(num_rows: int):
    # The formula counts half a square, the loop the triangle with its diagonal.
    diagonal = 2 * 2 * 2 * 3 * num_rows
    assert sequence_flops(SIZES)(num_rows) == pytest.approx(by_hand(num_rows) - diagonal)


def test_without_a_model_rows_count():
    assert SequenceCost()(17) == 17.0


def test_the_formula_is_what_torch_counts_in_a_model():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=56,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyright: ignore[reportCallIssue] - accepted through kwargs
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config)
    num_rows = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(num_rows)[None], use_cache=False)
    # Not of the formula: the routers, rotary tables (16 / 2 angles a row), attention above the diagonal.
    routers = 2 * (2 * 32 * 8) * num_rows
    rotary = 2 * (16 // 2) * num_rows
    cost = sequence_flops(describe(config.to_dict(), "config.json"))
    masked_half = cost.quadratic * num_rows**2
    assert counter.get_total_flops() == cost(num_rows) + masked_half + routers + rotary
