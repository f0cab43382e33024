"""DeepSeek-V3 and R1: latent attention, sigmoid scores with an expert bias, groups, a shared expert, dense first
layers, YaRN, FP8 checkpoints.
"""

from __future__ import annotations

from moerl.models import sigmoid_routing
from moerl.models.family import EXPERTS, NO_ATTENTION_BIAS, OFF, UNTIED, Family, Rule, equal_heads, is_rule, rope_rule

FAMILY = Family(
    model_type="deepseek_v3",
    num_experts=("n_routed_experts", "num_local_experts"),
    moe_layers=sigmoid_routing.dense_prefix_layers,
    sizes=(*EXPERTS, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_shared_experts"),
    optional_sizes=("q_lora_rank", "n_group", "topk_group"),
    switches={**OFF, "norm_topk_prob": True, "rope_interleave": True},
    numbers={"routed_scaling_factor": 2.5},
    has_expert_bias=True,
    experts_class="transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3NaiveMoe",
    router_weights="sigmoid",
    rules=(
        *sigmoid_routing.RULES,
        UNTIED,
        NO_ATTENTION_BIAS,
        is_rule("rope_interleave", True, "Megatron's latent attention rotates interleaved pairs only"),
        is_rule("rms_norm_eps", 1e-6, "the Hugging Face model has 1e-6 in the norms of its latents whatever this says"),
        Rule(
            ("q_lora_rank",),
            lambda config: bool(config.get("q_lora_rank")),
            "a positive rank",
            "Megatron normalises the input of an uncompressed query a second time",
        ),
        equal_heads("latent attention has one key and one value per head"),
        rope_rule("default", "yarn"),
    ),
    megatron_settings=sigmoid_routing.megatron_settings,
)
