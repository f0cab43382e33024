from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES

from moerl.errors import ConfigError
from moerl.models import families
from moerl.models.description import refuse_untrainable

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def _config(name: str, **changes: Any) -> dict[str, Any]:
    return FAMILIES[name].config().to_dict() | changes


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_configs_that_can_be_trained(name: str):
    refuse_untrainable(_config(name))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek_v3", {"quantization_config": FP8}),
        ("deepseek_v3", {"n_group": None, "topk_group": None, "num_experts_per_tok": 3}),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}),
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("qwen3_moe", {"rope_parameters": YARN}),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 4096}),
        ("glm4_moe", {"attention_bias": True}),
    ],
    ids=str,
)
def test_what_megatron_computes_in_the_same_way_is_allowed(name: str, change: dict[str, Any]):
    refuse_untrainable(_config(name, **change))


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("deepseek_v3", {"num_experts_per_tok": 3}, "2 x topk_group"),
        ("glm4_moe", {"n_group": 4, "topk_group": 2}, "2 x topk_group"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "single expert"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("deepseek_v3", {"rope_parameters": YARN | {"attention_factor": 1.1}}, "rotary"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7}}, "rotary"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rotary"),
        ("glm4_moe", {"rope_parameters": YARN}, "rotary"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
        ("qwen3_moe", {"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "quantization_config"),
        ("olmoe", {"clip_qkv": 8.0}, "clip"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("olmoe", {"model_type": "deepseek_v2"}, "unknown"),
    ],
    ids=str,
)
def test_what_megatron_computes_in_another_way_is_refused(name: str, change: dict[str, Any], word: str):
    with pytest.raises(ConfigError, match=word):
        refuse_untrainable(_config(name, **change))


def test_every_family_with_a_record_is_among_the_tested_ones():
    assert {family.config().model_type for family in FAMILIES.values()} == set(families.FAMILIES)
