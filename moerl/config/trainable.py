"""Model configs that cannot be trained, by family: where Megatron and Hugging Face would compute two different models.

Torch-free; any process. Checked on the login node for a model directory and again by every trainer rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moerl.contract.spec import family_of, rope_parameters
from moerl.errors import ConfigError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """keys: what it looks at. allowed: True where the model can be trained. expected, reason: for the error."""

    keys: tuple[str, ...]
    allowed: Callable[[Config], bool]
    expected: str
    reason: str


def refuse_untrainable(config: Config) -> None:
    """Raises where the trainer would compute another model than the config describes.

    Args:
        config: content of a Hugging Face config.

    Raises:
        ConfigError: the family is unknown, or a setting cannot be trained; names the setting and the reason.
    """
    family_of(config)
    for rule in (*_EVERY_FAMILY, *_RULES[config["model_type"]]):
        if not rule.allowed(config):
            raise ConfigError(
                f"model config ({config['model_type']}): {', '.join(rule.keys)}: {rule.reason}",
                seen={key: config.get(key) for key in rule.keys},
                expected=rule.expected,
                remedy="use another model; this one can be sampled from, not trained",
            )


def _is(key: str, value: object, default: object, reason: str) -> Rule:
    return Rule((key,), lambda config: config.get(key, default) == value, repr(value), reason)


def _rope(*types: str) -> Rule:
    return Rule(
        ("rope_parameters", "rope_scaling"),
        lambda config: _rope_allowed(rope_parameters(config), types),
        f"type {' or '.join(types)}, without attention_factor, mscale and mscale_all_dim both or neither",
        "Megatron has no such rotary embedding",
    )


def _rope_allowed(rope: Mapping[str, Any], types: tuple[str, ...]) -> bool:
    if rope["rope_type"] != "yarn":
        return rope["rope_type"] in types
    both = bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim"))
    known = "attention_factor" not in rope and "original_max_position_embeddings" in rope
    return "yarn" in types and both and known


def _is_block_fp8(config: Config) -> bool:
    quantised = config.get("quantization_config")
    if quantised is None:
        return True
    return quantised.get("quant_method") == "fp8" and list(quantised.get("weight_block_size") or ()) == [128, 128]


def _groups_agree(config: Config) -> bool:
    return (config.get("n_group") or 1) == 1 or config["num_experts_per_tok"] == 2 * config["topk_group"]


_EVERY_FAMILY = (
    _is("hidden_act", "silu", "silu", "the bridge builds gated SiLU layers only"),
    Rule(
        ("quantization_config",),
        _is_block_fp8,
        "none, or quant_method fp8 with weight_block_size [128, 128]",
        "weights are dequantised on load, in this format alone",
    ),
)
_UNTIED = _is("tie_word_embeddings", False, False, "the bridge builds an output layer of its own")
_NO_ATTENTION_BIAS = _is("attention_bias", False, False, "the bridge drops the biases of attention")
_SIGMOID_ROUTING = (
    Rule(
        ("n_group", "topk_group", "num_experts_per_tok"),
        _groups_agree,
        "n_group=1, or num_experts_per_tok = 2 x topk_group",
        "Megatron ranks groups by their best num_experts_per_tok / topk_group experts, Hugging Face by their best 2",
    ),
    _is("norm_topk_prob", True, True, "Megatron always normalises sigmoid scores over the chosen experts"),
    Rule(
        ("num_experts_per_tok",),
        lambda config: config["num_experts_per_tok"] > 1,
        "at least 2",
        "Megatron does not normalise the score of a single expert",
    ),
    _is("scoring_func", "sigmoid", "sigmoid", "the family's Hugging Face model has sigmoid scores only"),
    _is("topk_method", "noaux_tc", "noaux_tc", "the family's Hugging Face model has bias-corrected top-k only"),
    _is("moe_layer_freq", 1, 1, "the family's Hugging Face model has experts in every layer after the dense ones"),
)

_RULES: dict[str, tuple[Rule, ...]] = {
    "qwen3_moe": (
        _NO_ATTENTION_BIAS,
        _is("use_sliding_window", False, False, "Megatron would attend to the whole sequence"),
        _rope("default", "yarn"),
    ),
    "deepseek_v3": (
        *_SIGMOID_ROUTING,
        _UNTIED,
        _NO_ATTENTION_BIAS,
        _is("rope_interleave", True, True, "Megatron's latent attention rotates interleaved pairs only"),
        _is(
            "rms_norm_eps", 1e-6, 1e-6, "the Hugging Face model has 1e-6 in the norms of its latents whatever this says"
        ),
        Rule(
            ("q_lora_rank",),
            lambda config: bool(config.get("q_lora_rank")),
            "a positive rank",
            "Megatron normalises the input of an uncompressed query a second time",
        ),
        Rule(
            ("num_key_value_heads", "num_attention_heads"),
            lambda config: config["num_key_value_heads"] == config["num_attention_heads"],
            "as many key-value heads as heads",
            "latent attention has one key and one value per head",
        ),
        _rope("default", "yarn"),
    ),
    "glm4_moe": (*_SIGMOID_ROUTING, _UNTIED, _rope("default")),
    "olmoe": (
        _UNTIED,
        _NO_ATTENTION_BIAS,
        _is("clip_qkv", None, None, "Megatron does not clip queries, keys and values"),
        Rule(
            ("num_key_value_heads", "num_attention_heads"),
            lambda config: config["num_key_value_heads"] == config["num_attention_heads"],
            "as many key-value heads as heads",
            "the bridge's norm over all keys has the width of the queries",
        ),
        _rope("default"),
    ),
}
"""By `model_type`; the same keys as `moerl.contract.families.FAMILIES`."""
