"""Names of this rank's weights in the whole model, whatever kind of module holds them."""

from __future__ import annotations

import pytest

from moerl.trainer.shards import whole_name

LAYER = "decoder.layers.1"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        (f"{LAYER}.self_attention.linear_qkv.weight", "decoder.layers.9.self_attention.linear_qkv.weight"),
        (f"{LAYER}.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.9.input_layernorm.weight"),
        (
            f"{LAYER}.self_attention.linear_q_up_proj.layer_norm_weight",
            "decoder.layers.9.self_attention.q_layernorm.weight",
        ),
        (
            f"{LAYER}.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.9.self_attention.kv_layernorm.weight",
        ),
        (f"{LAYER}.mlp.linear_fc1.layer_norm_weight", "decoder.layers.9.pre_mlp_layernorm.weight"),
        (f"{LAYER}.mlp.linear_fc1.weight", "decoder.layers.9.mlp.linear_fc1.weight"),
        (f"{LAYER}.mlp.experts.local_experts.3.linear_fc1.weight", "decoder.layers.9.mlp.experts.19.linear_fc1.weight"),
        (f"{LAYER}.mlp.experts.linear_fc2.weight3", "decoder.layers.9.mlp.experts.19.linear_fc2.weight"),
        (f"{LAYER}.mlp.shared_experts.linear_fc2.weight", "decoder.layers.9.mlp.shared_experts.linear_fc2.weight"),
        (f"{LAYER}.mlp.router.expert_bias", "decoder.layers.9.mlp.router.expert_bias"),
    ],
)
def test_layers_and_experts_are_counted_over_the_whole_model(name: str, expected: str):
    assert whole_name(name, [3, 9], first_expert=16) == expected
