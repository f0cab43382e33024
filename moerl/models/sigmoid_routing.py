"""Rules and settings that DeepSeek-V3 and GLM-4.5 share: sigmoid scores with an expert bias, groups of experts, shared
experts, and dense layers in front. Torch-free; any process.
"""

from __future__ import annotations

from typing import Any

from moerl.models.family import Config, Rule, is_rule

RULES = (
    Rule(
        ("n_group", "topk_group", "num_experts_per_tok"),
        lambda config: (config.get("n_group") or 1) == 1 or config["num_experts_per_tok"] == 2 * config["topk_group"],
        "n_group=1, or num_experts_per_tok = 2 x topk_group",
        "Megatron ranks groups by their best num_experts_per_tok / topk_group experts, Hugging Face by their best 2",
    ),
    is_rule("norm_topk_prob", True, "Megatron always normalises sigmoid scores over the chosen experts"),
    Rule(
        ("num_experts_per_tok",),
        lambda config: config["num_experts_per_tok"] > 1,
        "at least 2",
        "Megatron does not normalise the score of a single expert",
    ),
    is_rule("scoring_func", "sigmoid", "the family's Hugging Face model has sigmoid scores only"),
    is_rule("topk_method", "noaux_tc", "the family's Hugging Face model has bias-corrected top-k only"),
    is_rule("moe_layer_freq", 1, "the family's Hugging Face model has experts in every layer after the dense ones"),
)


def dense_prefix_layers(config: Config) -> tuple[int, ...]:
    """Returns all layers from `first_k_dense_replace` on."""
    return tuple(range(int(config.get("first_k_dense_replace") or 0), config["num_hidden_layers"]))


def megatron_settings(config: Config) -> dict[str, Any]:
    """Returns provider settings: shared experts are one MLP of all their sizes, and a single group of experts is no
    group."""
    grouped = (config.get("n_group") or 1) > 1
    return {
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
        "moe_router_num_groups": config["n_group"] if grouped else None,
        "moe_router_group_topk": config["topk_group"] if grouped else None,
        # Multi-token-prediction heads are neither built nor trained; see `moerl.trainer.tensors.bypassed_tensors`.
        "mtp_num_layers": None,
    }
