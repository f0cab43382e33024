"""The model families that moerl knows, as data: where experts, layers and architecture stand in their configs.

Torch-free; any process. A family is a Hugging Face `model_type`. What Megatron adds to it stands in
`moerl.trainer.families`, what the trainer has to refuse in `moerl.config.trainable`, how the embedded engine reads its
routers in `moerl.rollout.capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """One family: how its config is read. Keys are those of the published config.json and of transformers 5.

    num_experts: keys of E, the first that is there counts (transformers 5 writes other names than were published).
    moe_layers: indices of the decoder layers with experts, in order.
    sizes: integers of at least 1 that every config has. optional_sizes: integers, or absent, or null.
    switches: name -> value where it is absent. numbers: name -> value where it is absent.
    """

    num_experts: tuple[str, ...]
    moe_layers: Callable[[Config], tuple[int, ...]]
    sizes: tuple[str, ...]
    optional_sizes: tuple[str, ...] = ()
    switches: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


def sparse_step_layers(config: Config) -> tuple[int, ...]:
    """Layer i is MoE where i is not in `mlp_only_layers` and (i + 1) is a multiple of `decoder_sparse_step`."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def dense_prefix_layers(config: Config) -> tuple[int, ...]:
    """All layers from `first_k_dense_replace` on."""
    return tuple(range(int(config.get("first_k_dense_replace") or 0), config["num_hidden_layers"]))


def all_layers(config: Config) -> tuple[int, ...]:
    return tuple(range(config["num_hidden_layers"]))


_ATTENTION = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok")
_EXPERTS = (*_ATTENTION, "moe_intermediate_size")
_LATENT = (*_EXPERTS, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_shared_experts")
_OFF = {"attention_bias": False, "tie_word_embeddings": False}

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        num_experts=("num_experts", "num_local_experts"),
        moe_layers=sparse_step_layers,
        sizes=_EXPERTS,
        switches={**_OFF, "norm_topk_prob": False},
    ),
    "deepseek_v3": Family(
        num_experts=("n_routed_experts", "num_local_experts"),
        moe_layers=dense_prefix_layers,
        sizes=_LATENT,
        optional_sizes=("q_lora_rank", "n_group", "topk_group"),
        switches={**_OFF, "norm_topk_prob": True, "rope_interleave": True},
        numbers={"routed_scaling_factor": 2.5},
    ),
    "glm4_moe": Family(
        num_experts=("n_routed_experts", "num_local_experts"),
        moe_layers=dense_prefix_layers,
        sizes=(*_EXPERTS, "n_shared_experts"),
        optional_sizes=("n_group", "topk_group"),
        switches={**_OFF, "norm_topk_prob": True, "use_qk_norm": False},
        numbers={"routed_scaling_factor": 1.0},
    ),
    "olmoe": Family(
        num_experts=("num_experts", "num_local_experts"),
        moe_layers=all_layers,
        sizes=_ATTENTION,
        optional_sizes=("clip_qkv",),
        switches={**_OFF, "norm_topk_prob": False},
    ),
}
"""By `model_type`."""
