"""What each model family needs of Megatron-Bridge 0.6.2 beyond what its bridge sets.

Runs in every trainer rank. How a family's config is read stands in `moerl.contract.families`, what is refused in
`moerl.config.trainable`, how its checkpoint tensors are named in `moerl.trainer.tensors`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moerl.contract.spec import rope_parameters
from moerl.errors import ConfigError
from moerl.trainer import platform

Overrides = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MegatronFamily:
    """overrides: provider settings that the bridge gets wrong or leaves out, from the Hugging Face config.
    attention: import path of the self-attention module of a family with one of its own, or empty.
    tensor_parallel: False where the bridge's modules are wrong with more than one tensor-parallel rank.
    """

    overrides: Callable[[Mapping[str, Any]], Overrides]
    attention: str = ""
    tensor_parallel: bool = True


def _dense_prefix(config: Mapping[str, Any]) -> Overrides:
    """Shared experts are one MLP of all their sizes; choosing among groups of which all stay is no choice."""
    grouped = (config.get("n_group") or 1) > 1
    return {
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
        "moe_router_num_groups": config["n_group"] if grouped else None,
        "moe_router_group_topk": config["topk_group"] if grouped else None,
        # Multi-token-prediction heads are neither built nor trained; see `moerl.trainer.tensors.bypassed_tensors`.
        "mtp_num_layers": None,
    }


def _glm(config: Mapping[str, Any]) -> Overrides:
    return {**_dense_prefix(config), "rotary_percent": rope_parameters(config).get("partial_rotary_factor", 1.0)}


def _yarn(config: Mapping[str, Any]) -> Overrides:
    """The defaults of transformers for what a YaRN configuration leaves out; Megatron's fields have none."""
    rope = rope_parameters(config)
    if rope["rope_type"] != "yarn":
        return {}
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    settings = {f"yarn_{name}": rope.get(name, value) for name, value in defaults.items()}
    return {**settings, "yarn_correction_range_round_to_int": bool(rope.get("truncate", True))}


def _qwen3(config: Mapping[str, Any]) -> Overrides:
    """The bridge builds every layer with experts."""
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    frequency = [int(i not in dense and (i + 1) % step == 0) for i in range(config["num_hidden_layers"])]
    return {"moe_layer_freq": frequency, **_yarn(config)}


FAMILIES: dict[str, MegatronFamily] = {
    "qwen3_moe": MegatronFamily(_qwen3),
    "deepseek_v3": MegatronFamily(_dense_prefix),
    "glm4_moe": MegatronFamily(_glm),
    # The bridge's attention normalises queries and keys over all heads, but its norms are as wide as all ranks' heads.
    "olmoe": MegatronFamily(
        lambda config: {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)},
        attention="megatron.bridge.models.olmoe.olmoe_provider.OLMoESelfAttention",
        tensor_parallel=False,
    ),
}
"""By `model_type`; the same keys as `moerl.contract.families.FAMILIES`."""


def provider_overrides(config: Mapping[str, Any], *, moe_aux_loss_coef: float, tensor: int) -> Overrides:
    """Provider settings of a model's family and of load balancing, to be set over those of the bridge.

    The bias of experts is never updated inside Megatron: `moerl.trainer.balance` does so, after an update was applied.

    Args:
        config: content of the Hugging Face config.
        moe_aux_loss_coef: weight of the Switch load-balancing loss, per microbatch; 0 leaves it out.
        tensor: tensor-parallel size.

    Raises:
        ConfigError: the family cannot be cut over tensor-parallel ranks.
    """
    family = FAMILIES[config["model_type"]]
    if tensor > 1 and not family.tensor_parallel:
        raise ConfigError(
            f"parallel.tensor with a model of type {config['model_type']}",
            seen=tensor,
            expected="1: Megatron-Bridge's layers of this family are wrong with more",
            remedy="use parallel.expert, parallel.pipeline or data parallelism",
        )
    overrides = {
        **family.overrides(config),
        "moe_router_dtype": "fp32",
        "moe_router_fusion": False,
        "moe_aux_loss_coeff": moe_aux_loss_coef,
        "moe_router_load_balancing_type": "aux_loss" if moe_aux_loss_coef > 0 else "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_z_loss_coeff": None,
    }
    if not torch.cuda.is_available():
        overrides["transformer_layer_spec"] = _local_layer_spec(family)
    return overrides


def _local_layer_spec(family: MegatronFamily) -> Callable[..., Any]:
    """The local layers of this platform with what the family has of its own."""

    def spec(config: Any, vp_stage: int | None = None) -> Any:
        block = platform.local_layer_spec(config, vp_stage)
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention
            if family.attention:
                module, name = family.attention.rsplit(".", 1)
                attention.module = getattr(importlib.import_module(module), name)
        return block

    return spec
