"""Checkpoint tensors of every family: their names in Megatron's local layers, FP8, and tensors that are left out.

Runs in every trainer rank. Completes Megatron-Bridge 0.6.2, whose bridges know Transformer Engine's layers, log what
they miss, and cast FP8 weights that have no scales.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.machine.model_files import stored_tensors
from moerl.machine.model_tensors import FP8_BLOCK, SCALES, is_bypassed

_POST_NORM = "model.layers.*.post_attention_layernorm.weight"
_PLAIN = {
    "decoder.layers.*.mlp.linear_fc2.weight": "model.layers.*.mlp.down_proj.weight",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": _POST_NORM,
    "decoder.layers.*.input_layernorm.weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.pre_mlp_layernorm.weight": _POST_NORM,
}
"""Tensors of local layers and of dense ones that are a checkpoint's as they are."""
_GATED = {
    "megatron_param": "decoder.layers.*.mlp.linear_fc1.weight",
    "gate": "model.layers.*.mlp.gate_proj.weight",
    "up": "model.layers.*.mlp.up_proj.weight",
}
"""The first matrix of dense layers, and its parts in a checkpoint."""
_GROUPED_EXPERTS = re.compile(r"^decoder\.layers\.\*\.mlp\.experts\.(linear_fc[12]\.weight)\*$")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def adapt(bridge_class: Any) -> None:
    """Completes a bridge class: names of layers without Transformer Engine, dense layers, and FP8 that fails closed.

    Transformer Engine fuses norms into linears and experts into groups; the local layers have both on their own.
    Idempotent.
    """
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    if getattr(bridge_class, "_moerl_adapted", False):
        return
    AutoMapping.register_module_type("RMSNorm", "replicated")
    original = bridge_class.mapping_registry

    def mapping_registry(self: Any) -> Any:
        mappings = list(original(self).mappings)
        known = {mapping.megatron_param for mapping in mappings}
        wanted = [GatedMLPMapping(**_GATED), *(AutoMapping(ours, theirs) for ours, theirs in _PLAIN.items())]
        for mapping in mappings:
            if grouped := _GROUPED_EXPERTS.match(mapping.megatron_param):
                theirs = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"hf_param": mapping.hf_param}
                ours = f"decoder.layers.*.mlp.experts.local_experts.*.{grouped[1]}"
                wanted.append(type(mapping)(ours, **theirs))
        return MegatronMappingRegistry(*mappings, *(new for new in wanted if new.megatron_param not in known))

    bridge_class.mapping_registry = mapping_registry
    bridge_class.build_conversion_tasks = _complete(bridge_class.build_conversion_tasks)
    bridge_class.maybe_modify_loaded_hf_weight = lambda self, hf_param, state: read_weights(hf_param, state)
    bridge_class._moerl_adapted = True


def _complete(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `build_conversion_tasks` that raises `CheckpointError` for a parameter without a checkpoint tensor. The
    bridge's own only logs it, and leaves the parameter at its initial value."""
    from megatron.bridge.models.conversion.utils import persistent_buffers

    @functools.wraps(original)
    def build(self: Any, hf_pretrained: Any, megatron_model: list[Any], *args: Any, **kwargs: Any) -> Any:
        tasks = original(self, hf_pretrained, megatron_model, *args, **kwargs)
        found = {(t.vp_stage, t.param_name) for t in tasks if t is not None and t.param_weight is not None}
        tied = megatron_model[0].config.share_embeddings_and_output_weights
        left = [
            name
            for stage, chunk in enumerate(megatron_model)
            for name, _ in (*chunk.named_parameters(), *persistent_buffers(chunk))
            if "_extra_state" not in name and (stage, name) not in found and not (tied and "output_layer" in name)
        ]
        if left:
            raise CheckpointError(
                "the checkpoint does not have every parameter of the model",
                seen=f"{len(left)} without a tensor, first '{left[0]}'",
                expected="a checkpoint tensor for every parameter",
                remedy="use a whole checkpoint of the model that its config.json describes",
            )
        return tasks

    return build


def read_weights(hf_param: str | dict[str, str], state: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Returns the checkpoint tensors of one Megatron parameter, FP8 weights multiplied by their block scales.

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
    scale_name = f"{name}{SCALES}"
    blocks = [-(-size // FP8_BLOCK) for size in weight.shape]
    scales = state.get(scale_name)
    if scales is None or list(scales.shape) != blocks:
        raise CheckpointError(
            f"FP8 weight '{name}' cannot be dequantised",
            seen=f"{scale_name} " + ("is missing" if scales is None else f"of shape {list(scales.shape)}"),
            expected=f"shape {blocks}: one scale per block of {FP8_BLOCK} x {FP8_BLOCK}",
            remedy="use a checkpoint with 128 x 128 block scales, or the bfloat16 checkpoint of the model",
        )
    return dequantise(weight, scales)


def dequantise(weight_MN: Tensor, scales_mn: Tensor) -> Tensor:
    """Returns an FP8 weight times the scales of its 128 x 128 blocks, float32 [M, N]; scales are [ceil(M/128),
    ceil(N/128)]."""
    rows, columns = weight_MN.shape
    scales = scales_mn.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return weight_MN.float() * scales


# --- multi-token prediction ------------------------------------------------------------------------------------------


def bypassed_tensors(hf_path: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the multi-token-prediction tensors of a checkpoint as they are stored, FP8 weights as bfloat16.

    These tensors are not trained: an export takes them from the checkpoint, so that it is whole for an engine that
    drafts with them. With the policy's training they become stale, which costs accepted drafts and never correctness.
    """
    files = {name: stored.file for name, stored in stored_tensors(hf_path).items()}
    for name in files:
        if is_bypassed(name, config) and not name.endswith(SCALES):
            state = {each: _read_tensor(files[each], each) for each in (name, f"{name}{SCALES}") if each in files}
            weight = state[name]
            yield name, _read_weight(name, state).bfloat16() if weight.dtype in _FP8 else weight


def _read_tensor(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        return handle.get_tensor(name)


def refuse_unknown(hf_path: Path, config: Mapping[str, Any], bridge: Any) -> None:
    """Raises `CheckpointError` if a checkpoint has tensors that are neither loaded nor knowingly left out.

    Args:
        config: content of its Hugging Face config.
        bridge: the adapted model bridge, which has loaded the checkpoint.

    Raises:
        CheckpointError: a tensor would be lost in silence.
    """
    registry = bridge.mapping_registry()

    def is_known(name: str) -> bool:
        layer = re.match(r"^model\.layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= config["num_hidden_layers"]:
            return is_bypassed(name, config)
        plain = name.removesuffix(SCALES)
        return registry.hf_to_megatron_lookup(plain) is not None or name.endswith("rotary_emb.inv_freq")

    left = [name for name in stored_tensors(hf_path) if not is_known(name)]
    if left:
        raise CheckpointError(
            f"{hf_path} holds tensors that the trainer would lose",
            seen=f"{len(left)} of them, first '{min(left)}'",
            expected="only tensors of the model's parameters and of multi-token-prediction heads",
            remedy="use a checkpoint of the plain model, without adapters or other additions",
        )
