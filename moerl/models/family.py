"""Record of a model family, and the parts that families share.

Torch-free; any process. A family is a Hugging Face `model_type`; its record is a file of `moerl.models.families`. From
the record follow the description of a model (`moerl.models.description`), the checkpoint's and Megatron's tensors,
routing capture and enforcement in transformers, and the settings of Megatron-Bridge. Code of transformers and Megatron
is named by import path and loaded by the code that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moerl.errors import ConfigError

Config = Mapping[str, Any]
QKNorm = Literal["none", "head", "all_heads"]
"""Norms of queries and keys: none, one that every head shares, or one over all heads together."""
RouterWeights = Literal["softmax", "sigmoid"]
"""Function by which a router makes weights of its logits at the chosen experts (`moerl.rollout.enforce`)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on configs that can be trained."""

    keys: tuple[str, ...]
    """Keys of the config that the rule looks at."""
    allowed: Callable[[Config], bool]
    """Test of a config: True if the model can be trained."""
    expected: str
    """Values that can be trained, for the error."""
    reason: str
    """Reason of the rule, for the error."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family. Keys are those of the published config.json and of transformers 5.

    The fingerprint is over `sizes`, `optional_sizes`, `switches` and `numbers`, and over facts that every family has
    (`moerl.models.spec`).
    """

    model_type: str
    """`model_type` of the config."""
    num_experts: tuple[str, ...]
    """Keys of E; the first that is there counts (transformers 5 writes other names than were published)."""
    moe_layers: Callable[[Config], tuple[int, ...]]
    """Function of the config: indices of the decoder layers with experts, in order."""
    sizes: tuple[str, ...]
    """Keys of integers of at least 1 that every config has."""
    experts_class: str
    """Import path of the experts module of a layer in transformers, called as (hidden states [R, H], expert ids [R, K],
    weights [R, K])."""
    optional_sizes: tuple[str, ...] = ()
    """Keys of integers that may be absent or null."""
    switches: Mapping[str, bool] = field(default_factory=dict)
    """Keys of booleans -> value if the key is absent."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Keys of numbers -> value if the key is absent."""
    expert_size: str = "moe_intermediate_size"
    """Key of the inner width of an expert."""
    qk_norm: Callable[[Config], QKNorm] = lambda config: "none"
    """Function of the config: norms of queries and keys."""
    attention_biases: Callable[[Config], tuple[str, ...]] = lambda config: ()
    """Function of the config: projections with a bias, of "qkv" and "output"."""
    has_expert_bias: bool = False
    """True if routers keep a bias per expert, which decides the choice alone."""
    router_weights: RouterWeights = "softmax"
    """Function by which the router in transformers weighs the chosen experts."""
    rules: tuple[Rule, ...] = ()
    """Conditions besides those of every family."""
    megatron_settings: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Function of the config: provider settings that Megatron-Bridge gets wrong or leaves out."""
    megatron_attention: str = ""
    """Import path of the self-attention module in Megatron-Bridge of a family with one of its own, or empty."""
    tensor_parallel: bool = True
    """False if the bridge's modules are wrong with more than one tensor-parallel rank."""


ATTENTION = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok")
EXPERTS = (*ATTENTION, "moe_intermediate_size")
OFF = {"attention_bias": False, "tie_word_embeddings": False}


# --- rotary embeddings -----------------------------------------------------------------------------------------------


def rope_parameters(config: Config) -> dict[str, Any]:
    """Returns rotary parameters in one shape: transformers 5 nests them, 4 had `rope_theta` and others at the top.

    Raises:
        ConfigError: there is no rotary base.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise ConfigError(
            "model config: rope_theta",
            seen=theta,
            expected="a number, at the top level or in rope_parameters",
            remedy="correct the model config",
        )
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        rope["partial_rotary_factor"] = partial
    numbers = {name: float(value) for name, value in rope.items() if type(value) in (int, float)}
    return {**rope, **numbers, "rope_theta": float(theta)}


# --- rules -----------------------------------------------------------------------------------------------------------


def is_rule(key: str, value: object, reason: str) -> Rule:
    """Returns the rule that `key` is `value`, or absent."""
    return Rule((key,), lambda config: config.get(key, value) == value, repr(value), reason)


def rope_rule(*types: str) -> Rule:
    """Returns the rule that the rotary embedding is of one of `types`, and that Megatron has it."""
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


UNTIED = is_rule("tie_word_embeddings", False, "the bridge builds an output layer of its own")
NO_ATTENTION_BIAS = is_rule("attention_bias", False, "the bridge drops the biases of attention")


def equal_heads(reason: str) -> Rule:
    """Returns the rule that there are as many key-value heads as query heads."""
    return Rule(
        ("num_key_value_heads", "num_attention_heads"),
        lambda config: config["num_key_value_heads"] == config["num_attention_heads"],
        "as many key-value heads as heads",
        reason,
    )
