from __future__ import annotations

from typing import Any

import pytest

from moerl.errors import ConfigError
from moerl.models.spec import moe_layer_indices, spec_from_hf_config


def _config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "vocab_size": 87,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
    }
    return base | changes


def test_the_facts_of_a_qwen3_moe_config_are_read():
    spec = spec_from_hf_config(_config())
    assert (spec.num_moe_layers, spec.experts_per_token, spec.num_experts, spec.vocab_size) == (4, 2, 8, 87)
    assert len(spec.fingerprint) == 16


def test_dense_layers_are_not_counted():
    config = _config(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert moe_layer_indices(config) == (1, 5)
    assert spec_from_hf_config(config).num_moe_layers == 2


def test_the_two_spellings_of_a_config_have_one_fingerprint():
    old = _config()
    new = {name: value for name, value in old.items() if name not in ("num_experts", "rope_theta")}
    new |= {"use_sliding_window": False, "sliding_window": 4096}
    new |= {"num_local_experts": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    assert spec_from_hf_config(old) == spec_from_hf_config(new)


def test_fields_that_do_not_change_the_model_leave_the_fingerprint_alone():
    config = _config(dtype="bfloat16", transformers_version="5.12.1", router_aux_loss_coef=1, eos_token_id=1)
    assert spec_from_hf_config(config) == spec_from_hf_config(_config())


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 256},
        {"num_key_value_heads": 4},
        {"num_experts": 16},
        {"norm_topk_prob": False},
        {"rope_theta": 1e6},
        {"tie_word_embeddings": False},
        {"mlp_only_layers": [0]},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    ],
    ids=str,
)
def test_every_change_of_architecture_changes_the_fingerprint(change: dict[str, Any]):
    assert spec_from_hf_config(_config(**change)).fingerprint != spec_from_hf_config(_config()).fingerprint


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'"),
        ({"model_type": None}, "model_type=None"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "no MoE layer"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"vocab_size": "87"}, "vocab_size"),
        ({"rope_theta": None}, "rope_theta"),
    ],
    ids=str,
)
def test_an_unknown_or_impossible_config_is_refused(change: dict[str, Any], word: str):
    with pytest.raises(ConfigError, match=word):
        spec_from_hf_config(_config(**change))
