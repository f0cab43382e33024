"""Qwen3-MoE: softmax scores, normalised or not; dense layers among the MoE layers; YaRN."""

from __future__ import annotations

from typing import Any

from moerl.models.family import EXPERTS, NO_ATTENTION_BIAS, OFF, Config, Family, is_rule, rope_parameters, rope_rule


def _moe_layers(config: Config) -> tuple[int, ...]:
    """Returns all layers i that are not in `mlp_only_layers` and for which (i + 1) is a multiple of
    `decoder_sparse_step`."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def _megatron_settings(config: Config) -> dict[str, Any]:
    """Returns the layers with experts, since the bridge by itself builds every layer with experts, and the settings of
    YaRN, with the defaults of transformers for what a configuration leaves out; Megatron's fields have none."""
    moe_layers, rope = set(_moe_layers(config)), rope_parameters(config)
    settings: dict[str, Any] = {"moe_layer_freq": [int(i in moe_layers) for i in range(config["num_hidden_layers"])]}
    if rope["rope_type"] == "yarn":
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        settings |= {f"yarn_{name}": rope.get(name, value) for name, value in defaults.items()}
        settings["yarn_correction_range_round_to_int"] = bool(rope.get("truncate", True))
    return settings


FAMILY = Family(
    model_type="qwen3_moe",
    num_experts=("num_experts", "num_local_experts"),
    moe_layers=_moe_layers,
    sizes=EXPERTS,
    switches={**OFF, "norm_topk_prob": False},
    qk_norm=lambda config: "head" if config.get("use_qk_norm", True) else "none",
    attention_biases=lambda config: ("qkv", "output") if config.get("attention_bias") else (),
    experts_class="transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
    router_weights="softmax",
    rules=(
        NO_ATTENTION_BIAS,
        is_rule("use_sliding_window", False, "Megatron would attend to the whole sequence"),
        rope_rule("default", "yarn"),
    ),
    megatron_settings=_megatron_settings,
)
