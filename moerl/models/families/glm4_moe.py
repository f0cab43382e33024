"""GLM-4.5, Air and 4.6: sigmoid scores with an expert bias, shared experts, dense first layers, biases of queries, keys
and values, a rotary embedding of part of a head, and norms of queries and keys or none.
"""

from __future__ import annotations

from typing import Any

from moerl.models import sigmoid_routing
from moerl.models.family import EXPERTS, OFF, UNTIED, Config, Family, rope_parameters, rope_rule


def _megatron_settings(config: Config) -> dict[str, Any]:
    rotary = rope_parameters(config).get("partial_rotary_factor", 1.0)
    return {**sigmoid_routing.megatron_settings(config), "rotary_percent": rotary}


FAMILY = Family(
    model_type="glm4_moe",
    num_experts=("n_routed_experts", "num_local_experts"),
    moe_layers=sigmoid_routing.dense_prefix_layers,
    sizes=(*EXPERTS, "n_shared_experts"),
    optional_sizes=("n_group", "topk_group"),
    switches={**OFF, "norm_topk_prob": True, "use_qk_norm": False},
    numbers={"routed_scaling_factor": 1.0},
    qk_norm=lambda config: "head" if config.get("use_qk_norm") else "none",
    attention_biases=lambda config: ("qkv",) if config.get("attention_bias") else (),
    has_expert_bias=True,
    experts_class="transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeNaiveMoe",
    router_weights="sigmoid",
    rules=(*sigmoid_routing.RULES, UNTIED, rope_rule("default")),
    megatron_settings=_megatron_settings,
)
