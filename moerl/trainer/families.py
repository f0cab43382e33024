"""What each model family needs of Megatron-Bridge 0.6.2: provider settings, names of the local layers, bypassed tensors.

Runs in every trainer rank. How a family's config is read stands in `moerl.contract.families`, what is refused in
`moerl.config.trainable`.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.contract.spec import rope_parameters
from moerl.errors import CheckpointError, ConfigError
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
        # Multi-token-prediction heads are neither built nor trained; see `bypassed_tensors`.
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


# --- names and values of checkpoint tensors --------------------------------------------------------------------------

_LOCAL_NORMS = {
    "decoder.layers.*.input_layernorm.weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
}
_GROUPED_EXPERTS = re.compile(r"^decoder\.layers\.\*\.mlp\.experts\.(linear_fc[12]\.weight)\*$")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP8_BLOCK = 128


def adapt(bridge_class: Any) -> None:
    """Completes a bridge class: names of layers without Transformer Engine, dense layers, and FP8 that fails closed.

    Transformer Engine fuses norms into linears and experts into groups; the local layers have both on their own.
    Idempotent.
    """
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    if getattr(bridge_class, "_moerl_adapted", False):
        return
    AutoMapping.register_module_type("RMSNorm", "replicated")
    original = bridge_class.mapping_registry

    def mapping_registry(self: Any) -> Any:
        mappings = list(original(self).mappings)
        known = {mapping.megatron_param for mapping in mappings}
        wanted = [*_dense_mlp_mappings(), *_local_expert_mappings(mappings)]
        wanted += [AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in _LOCAL_NORMS.items()]
        return MegatronMappingRegistry(*mappings, *(new for new in wanted if new.megatron_param not in known))

    bridge_class.mapping_registry = mapping_registry
    bridge_class.maybe_modify_loaded_hf_weight = lambda self, hf_param, state: read_weights(hf_param, state)
    bridge_class._moerl_adapted = True


def _local_expert_mappings(mappings: list[Any]) -> Iterator[Any]:
    for mapping in mappings:
        grouped = _GROUPED_EXPERTS.match(mapping.megatron_param)
        if grouped:
            local = copy.copy(mapping)
            local.__init__(f"decoder.layers.*.mlp.experts.local_experts.*.{grouped[1]}", **_sources(mapping))
            yield local


def _sources(mapping: Any) -> dict[str, str]:
    """The constructor arguments of a mapping that name checkpoint tensors."""
    return mapping.hf_param if isinstance(mapping.hf_param, dict) else {"hf_param": mapping.hf_param}


def _dense_mlp_mappings() -> list[Any]:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    prefix = "model.layers.*.mlp"
    return [
        GatedMLPMapping(
            megatron_param="decoder.layers.*.mlp.linear_fc1.weight",
            gate=f"{prefix}.gate_proj.weight",
            up=f"{prefix}.up_proj.weight",
        ),
        AutoMapping("decoder.layers.*.mlp.linear_fc2.weight", f"{prefix}.down_proj.weight"),
        AutoMapping(
            "decoder.layers.*.mlp.linear_fc1.layer_norm_weight", "model.layers.*.post_attention_layernorm.weight"
        ),
    ]


def read_weights(hf_param: str | dict[str, str], state: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """The checkpoint tensors of one Megatron parameter, FP8 weights multiplied by their block scales.

    Args:
        hf_param: a checkpoint name, or names by role.
        state: the checkpoint.

    Raises:
        CheckpointError: an FP8 weight has no scales, or scales of another block size than 128 x 128.
    """
    if isinstance(hf_param, dict):
        return {role: _read_weight(name, state) for role, name in hf_param.items()}
    return _read_weight(hf_param, state)


def _read_weight(name: str, state: Mapping[str, Tensor]) -> Tensor:
    weight = state[name]
    if weight.dtype not in _FP8:
        return weight
    scale_name = f"{name}_scale_inv"
    blocks = [-(-size // _FP8_BLOCK) for size in weight.shape]
    scales = state[scale_name] if scale_name in state else None
    if scales is None or list(scales.shape) != blocks:
        raise CheckpointError(
            f"FP8 weight '{name}' cannot be dequantised",
            seen=f"{scale_name} " + ("is missing" if scales is None else f"of shape {list(scales.shape)}"),
            expected=f"shape {blocks}: one scale per block of {_FP8_BLOCK} x {_FP8_BLOCK}",
            remedy="use a checkpoint with 128 x 128 block scales, or the bfloat16 checkpoint of the model",
        )
    return dequantise(weight, scales)


def dequantise(weight_MN: Tensor, scales_mn: Tensor) -> Tensor:
    """float32 [M, N]: an FP8 weight times the scale of its 128 x 128 block; scales are [ceil(M/128), ceil(N/128)]."""
    rows, columns = weight_MN.shape
    scales = scales_mn.float().repeat_interleave(_FP8_BLOCK, 0)[:rows].repeat_interleave(_FP8_BLOCK, 1)[:, :columns]
    return weight_MN.float() * scales


# --- multi-token prediction ------------------------------------------------------------------------------------------


def is_bypassed(name: str, config: Mapping[str, Any]) -> bool:
    """True for checkpoint tensors of multi-token-prediction heads: layers behind the last decoder layer."""
    layer = re.match(r"^model\.layers\.(\d+)\.", name)
    first = config["num_hidden_layers"]
    return layer is not None and first <= int(layer[1]) < first + int(config.get("num_nextn_predict_layers") or 0)


def bypassed_tensors(hf_path: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The multi-token-prediction tensors of a checkpoint, as they are stored.

    They are not trained. An export that is to be whole for an engine that drafts with them takes them from here; with
    the policy's training they become stale, which costs accepted drafts and never correctness.
    """
    from safetensors import safe_open

    for file, names in _files(hf_path).items():
        wanted = [name for name in names if is_bypassed(name, config)]
        if wanted:
            with safe_open(hf_path / file, framework="pt") as handle:
                for name in wanted:
                    yield name, handle.get_tensor(name)


def refuse_unknown_tensors(hf_path: Path, config: Mapping[str, Any], known: set[str]) -> None:
    """Raises where a checkpoint holds tensors that are neither loaded nor knowingly left out.

    Args:
        known: checkpoint names that the model's parameters are loaded from.

    Raises:
        CheckpointError: a tensor would be lost in silence.
    """
    left = [
        name
        for names in _files(hf_path).values()
        for name in names
        if not (name in known or name.removesuffix("_scale_inv") in known or is_bypassed(name, config))
        and not name.endswith("rotary_emb.inv_freq")
        and not (config.get("tie_word_embeddings") and name == "lm_head.weight")
    ]
    if left:
        raise CheckpointError(
            f"{hf_path} holds tensors that the trainer would lose",
            seen=f"{len(left)} of them, first '{min(left)}'",
            expected="only tensors of the model's parameters and of multi-token-prediction heads",
            remedy="use a checkpoint of the plain model, without adapters or other additions",
        )


def _files(hf_path: Path) -> dict[str, list[str]]:
    """Names of a checkpoint's tensors by safetensors file."""
    from safetensors import safe_open

    index = hf_path / "model.safetensors.index.json"
    files: dict[str, list[str]] = {}
    if index.is_file():
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(file, []).append(name)
        return files
    with safe_open(hf_path / "model.safetensors", framework="pt") as handle:
        return {"model.safetensors": list(handle.keys())}
