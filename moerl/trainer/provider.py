"""The settings of Megatron-Bridge's provider for a model: those of its family's record, and those of every family.

Runs in every trainer rank. The bridge is Megatron-Bridge 0.6.2. Settings that a family needs and its bridge does not
make stand in its record (`moerl.models.families`), names of checkpoint tensors in `moerl.trainer.tensors`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from typing import Any

from moerl.errors import ConfigError
from moerl.models.description import ModelDescription
from moerl.models.family import Family
from moerl.trainer import platform


def provider_settings(model: ModelDescription, *, moe_aux_loss_coef: float, tensor: int) -> dict[str, Any]:
    """Returns provider settings of a model's family and of load balancing, which override those of the bridge.

    The bias of experts is never updated inside Megatron: `moerl.trainer.balance` does so, after an update was applied.

    Args:
        moe_aux_loss_coef: weight of the Switch load-balancing loss, per microbatch; 0 leaves it out.
        tensor: tensor-parallel size.

    Raises:
        ConfigError: the family cannot be cut over tensor-parallel ranks.
    """
    family = model.family
    if tensor > 1 and not family.tensor_parallel:
        raise ConfigError(
            f"parallel.tensor with a model of type {family.model_type}",
            seen=tensor,
            expected="1: Megatron-Bridge's layers of this family are wrong with more",
            remedy="use parallel.expert, parallel.pipeline or data parallelism",
        )
    return {
        **family.megatron_settings(model.hf_config),
        "moe_router_dtype": "fp32",
        "moe_router_fusion": False,
        "moe_aux_loss_coeff": moe_aux_loss_coef,
        "moe_router_load_balancing_type": "aux_loss" if moe_aux_loss_coef > 0 else "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_z_loss_coeff": None,
        "transformer_layer_spec": partial(_layer_spec, family),
    }


def passed_on(passed: Mapping[str, Any], settings: Mapping[str, Any], provider: Any) -> Mapping[str, Any]:
    """Returns `trainer.megatron` if the provider has all of these settings.

    Args:
        passed: `trainer.megatron`. settings: those that moerl makes, by name. provider: a dataclass.

    Raises:
        ConfigError: moerl makes one of the settings itself, or the provider has no field of that name.
    """
    known = {each.name for each in fields(provider)}
    for name, value in passed.items():
        if name in settings:
            raise ConfigError(
                f"trainer.megatron.{name}: set by moerl for this model on this machine",
                seen=value,
                expected=f"no value; it is {settings[name]}",
                remedy="leave it away",
            )
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"trainer.megatron.{name}: Megatron has no such setting",
                seen=value,
                expected=f"a field of {type(provider).__name__}",
                remedy=f"did you mean {near[0]}?" if near else "leave it away",
            )
    return passed


def finalize(provider: Any, passed: Mapping[str, Any]) -> None:
    """Has the provider check and complete its settings.

    Args:
        provider: with all settings. passed: `trainer.megatron`, which is among them.

    Raises:
        ConfigError: it refuses them, and some were passed on.
    """
    try:
        provider.finalize()
    except (AssertionError, TypeError, ValueError) as error:
        if not passed:
            raise
        raise ConfigError(
            "trainer.megatron: Megatron refuses these settings, or these together with those of the run",
            seen=dict(passed),
            expected=f"settings for which this holds: {error}",
            remedy="change them or leave them away",
        ) from error


def _layer_spec(family: Family, config: Any, vp_stage: int | None = None) -> Any:
    """Returns the spec of this platform's layers, with the family's own attention if it has one."""
    block = platform.layer_spec(config, vp_stage)
    if family.megatron_attention:
        module, name = family.megatron_attention.rsplit(".", 1)
        attention = getattr(importlib.import_module(module), name)
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = attention
    return block
