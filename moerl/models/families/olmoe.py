"""OLMoE: softmax scores, normalised or not; norms of queries and keys over all heads; no tensor parallelism."""

from __future__ import annotations

from moerl.models.family import ATTENTION, NO_ATTENTION_BIAS, OFF, UNTIED, Family, equal_heads, is_rule, rope_rule

FAMILY = Family(
    model_type="olmoe",
    num_experts=("num_experts", "num_local_experts"),
    moe_layers=lambda config: tuple(range(config["num_hidden_layers"])),
    sizes=ATTENTION,
    optional_sizes=("clip_qkv",),
    switches={**OFF, "norm_topk_prob": False},
    # There are no dense layers: the width of the experts has their name.
    expert_size="intermediate_size",
    qk_norm=lambda config: "all_heads",
    attention_biases=lambda config: ("qkv", "output") if config.get("attention_bias") else (),
    experts_class="transformers.models.olmoe.modeling_olmoe.OlmoeExperts",
    router_weights="softmax",
    rules=(
        UNTIED,
        NO_ATTENTION_BIAS,
        is_rule("clip_qkv", None, "Megatron does not clip queries, keys and values"),
        equal_heads("the bridge's norm over all keys has the width of the queries"),
        rope_rule("default"),
    ),
    megatron_settings=lambda config: {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)},
    # The bridge's attention normalises queries and keys over all heads, but its norms are as wide as all ranks' heads.
    megatron_attention="megatron.bridge.models.olmoe.olmoe_provider.OLMoESelfAttention",
    tensor_parallel=False,
)
