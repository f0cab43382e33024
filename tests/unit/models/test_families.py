"""The configs of every family as they are published."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from families import FAMILIES

from moerl.errors import ConfigError
from moerl.models import families
from moerl.models.description import LatentAttention, describe
from moerl.models.family import Family
from moerl.models.spec import moe_layer_indices, spec_from_hf_config

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
}
GLM45: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    ("config", "facts"),
    [(DEEPSEEK_V3, (58, 8, 256, 129280)), (GLM45, (89, 8, 160, 151552))],
    ids=["DeepSeek-V3", "GLM-4.5"],
)
def test_a_published_config_is_read(config: dict[str, Any], facts: tuple[int, ...]):
    spec = spec_from_hf_config(config)
    assert (spec.num_moe_layers, spec.experts_per_token, spec.num_experts, spec.vocab_size) == facts
    assert moe_layer_indices(config)[0] == 3


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GLM45], ids=["DeepSeek-V3", "GLM-4.5"])
def test_transformers_own_copy_of_a_published_config_has_its_fingerprint(config: dict[str, Any]):
    from transformers import AutoConfig

    copy = AutoConfig.for_model(**config).to_dict()
    assert "rope_parameters" in copy
    assert spec_from_hf_config(copy) == spec_from_hf_config(config)


@pytest.mark.parametrize(
    "change",
    [
        {"n_group": 4},
        {"topk_group": 2},
        {"routed_scaling_factor": 1.0},
        {"first_k_dense_replace": 1},
        {"n_shared_experts": 2},
        {"kv_lora_rank": 256},
        {"rope_interleave": False},
        {"v_head_dim": 64},
        {"qk_rope_head_dim": 32},
        {"rope_scaling": None},
    ],
    ids=str,
)
def test_what_changes_a_deepseek_changes_its_fingerprint(change: dict[str, Any]):
    assert spec_from_hf_config(DEEPSEEK_V3 | change).fingerprint != spec_from_hf_config(DEEPSEEK_V3).fingerprint


@pytest.mark.parametrize(
    "change", [{"use_qk_norm": False}, {"partial_rotary_factor": 1.0}, {"attention_bias": False}], ids=str
)
def test_what_changes_a_glm_changes_its_fingerprint(change: dict[str, Any]):
    assert spec_from_hf_config(GLM45 | change).fingerprint != spec_from_hf_config(GLM45).fingerprint


@pytest.mark.parametrize("change", [{"num_nextn_predict_layers": 0}, {"max_position_embeddings": 4096}], ids=str)
def test_heads_that_are_bypassed_and_lengths_leave_the_fingerprint_alone(change: dict[str, Any]):
    assert spec_from_hf_config(DEEPSEEK_V3 | change) == spec_from_hf_config(DEEPSEEK_V3)


def test_a_deepseek_without_experts_is_refused():
    with pytest.raises(ConfigError, match="no MoE layer"):
        spec_from_hf_config(DEEPSEEK_V3 | {"first_k_dense_replace": 61})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tiny_families_have_fingerprints_of_their_own(name: str):
    others = [family.spec().fingerprint for other, family in FAMILIES.items() if other != name]
    assert FAMILIES[name].spec().fingerprint not in others


@pytest.mark.parametrize("record", families.FAMILIES.values(), ids=lambda record: record.model_type)
def test_a_record_names_its_module_and_code_that_exists(record: Family):
    assert import_module(f"moerl.models.families.{record.model_type}").FAMILY is record
    for path in filter(None, (record.experts_class, record.megatron_attention)):
        module, name = path.rsplit(".", 1)
        # Megatron-Bridge is imported with care (`moerl.trainer.bridge`): its files are looked up, not run.
        found = find_spec(module.split(".")[0]) if module.startswith("megatron") else import_module(module)
        assert found is not None
        assert module.startswith("megatron") or hasattr(found, name)


def test_sizes_and_spec_are_read_from_one_config_once():
    model = describe(DEEPSEEK_V3, "config.json")
    assert model.spec == spec_from_hf_config(DEEPSEEK_V3)
    assert model.moe_layers == moe_layer_indices(DEEPSEEK_V3) == tuple(range(3, 61))
    assert (model.latent, model.shared_size, model.qk_norm_sizes) == (
        LatentAttention(1536, 512, 128, 64, 128),
        2048,
        (0, 0),
    )
    assert model.with_vocabulary(1000).spec.vocab_size == 1000
    assert model.with_vocabulary(200_000).spec.vocab_size == model.vocab_size == 129280
