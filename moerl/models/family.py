"""Record of a model family, and the parts that families share.

Torch-free; any process. A family is a Hugging Face `model_type`; its record is a file of `moerl.models.families`. From
the record follow the description of a model (`moerl.models.description`), the checkpoint's and Megatron's tensors,
routing capture and enforcement in transformers, and the settings of Megatron-Bridge. Code of transformers and Megatron
is named by import path and loaded where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moerl.models.rope import rope_parameters

Config = Mapping[str, Any]
QKNorm = Literal["none", "head", "all_heads"]
"""Norms of queries and keys: none, one that every head shares, or one over all heads together."""
RouterWeights = Literal["softmax", "sigmoid"]
"""How a router makes weights of its logits at the chosen experts (`moerl.rollout.enforce`)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on configs that can be trained.

    keys: what it looks at. allowed: True where the model can be trained. expected, reason: for the error.
    """

    keys: tuple[str, ...]
    allowed: Callable[[Config], bool]
    expected: str
    reason: str


@dataclass(frozen=True, slots=True)
class Family:
    """One family. Keys are those of the published config.json and of transformers 5.

    model_type: of the config. num_experts: keys of E, the first that is there counts (transformers 5 writes other names
    than were published). moe_layers: indices of the decoder layers with experts, in order.

    The fingerprint is over: sizes: integers of at least 1 that every config has. optional_sizes: integers, or absent,
    or null. switches: name -> value where it is absent. numbers: name -> value where it is absent.

    Tensors: expert_size: key of the inner width of an expert. qk_norm: see `QKNorm`. attention_biases: the projections
    with a bias, of "qkv" and "output". has_expert_bias: routers keep a bias per expert, which decides the choice alone.

    transformers: experts_class: import path of the experts module of a layer, called as (hidden states [R, H], expert
    ids [R, K], weights [R, K]). router_weights: see `RouterWeights`.

    Megatron: rules: conditions besides those of every family. megatron_settings: provider settings that Megatron-Bridge
    gets wrong or leaves out. megatron_attention: import path of the self-attention module of a family with one of its
    own, or empty. tensor_parallel: False where the bridge's modules are wrong with more than one tensor-parallel rank.
    """

    model_type: str
    num_experts: tuple[str, ...]
    moe_layers: Callable[[Config], tuple[int, ...]]
    sizes: tuple[str, ...]
    experts_class: str
    optional_sizes: tuple[str, ...] = ()
    switches: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    expert_size: str = "moe_intermediate_size"
    qk_norm: Callable[[Config], QKNorm] = lambda config: "none"
    attention_biases: Callable[[Config], tuple[str, ...]] = lambda config: ()
    has_expert_bias: bool = False
    router_weights: RouterWeights = "softmax"
    rules: tuple[Rule, ...] = ()
    megatron_settings: Callable[[Config], dict[str, Any]] = lambda config: {}
    megatron_attention: str = ""
    tensor_parallel: bool = True


ATTENTION = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok")
EXPERTS = (*ATTENTION, "moe_intermediate_size")
OFF = {"attention_bias": False, "tie_word_embeddings": False}


# --- MoE layers ------------------------------------------------------------------------------------------------------


def sparse_step_layers(config: Config) -> tuple[int, ...]:
    """Layer i is MoE where i is not in `mlp_only_layers` and (i + 1) is a multiple of `decoder_sparse_step`."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def dense_prefix_layers(config: Config) -> tuple[int, ...]:
    """All layers from `first_k_dense_replace` on."""
    return tuple(range(int(config.get("first_k_dense_replace") or 0), config["num_hidden_layers"]))


def all_layers(config: Config) -> tuple[int, ...]:
    return tuple(range(config["num_hidden_layers"]))


# --- rules -----------------------------------------------------------------------------------------------------------


def is_rule(key: str, value: object, default: object, reason: str) -> Rule:
    """`key` is `value`; where it is absent it counts as `default`."""
    return Rule((key,), lambda config: config.get(key, default) == value, repr(value), reason)


def rope_rule(*types: str) -> Rule:
    """The rotary embedding is of one of `types`, and Megatron has it."""
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


UNTIED = is_rule("tie_word_embeddings", False, False, "the bridge builds an output layer of its own")
NO_ATTENTION_BIAS = is_rule("attention_bias", False, False, "the bridge drops the biases of attention")


def equal_heads(reason: str) -> Rule:
    """Returns the rule that there are as many key-value heads as query heads."""
    return Rule(
        ("num_key_value_heads", "num_attention_heads"),
        lambda config: config["num_key_value_heads"] == config["num_attention_heads"],
        "as many key-value heads as heads",
        reason,
    )
