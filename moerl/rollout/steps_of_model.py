"""The passes that fit a model: on its device, recorded if they can be. Runs inside the embedded rollout engine."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from moerl.contract.trajectory import ModelSpec
from moerl.rollout import host
from moerl.rollout.capture import RoutingCapture
from moerl.rollout.compiled_layers import CompiledLayers, knows_layers_of
from moerl.rollout.device_steps import DeviceSteps, why_not_recorded
from moerl.rollout.recorded import CudaGraphs, Unrecorded
from moerl.rollout.steps import HostSteps, Steps
from moerl.rollout.transformers_layers import TransformersLayers


def steps_of(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    capture: RoutingCapture,
    spec: ModelSpec,
    max_running: int,
    *,
    record: bool,
) -> tuple[Steps, str]:
    """Returns the passes of a model that an engine has taken over, and one line about them.

    Args:
        dtype: what its numbers are rounded to on a CPU, None if they are not.
        record: decoding steps are recorded if they can be.
    """
    device, precision = model.device, str(dtype or model.dtype).removeprefix("torch.")
    if host.is_host(model):
        is_known = knows_layers_of(model, dtype)
        layers = CompiledLayers(model, dtype) if is_known else TransformersLayers(model, capture)
        steps = HostSteps(layers, cast(nn.Module, model.get_output_embeddings()), spec.vocab_size)
        return steps, f"embedded engine on a CPU, {precision}"
    why_not = why_not_recorded(model) if record else "rollout.record_steps is false"
    if not why_not and device.type != "cuda":
        why_not = f"{device.type} has no CUDA graphs"
    recorder = Unrecorded(device) if why_not else CudaGraphs(device)
    how = f"not recorded: {why_not}" if why_not else "recorded as CUDA graphs"
    steps = DeviceSteps(model, capture, spec, max_running, recorder)
    return steps, f"embedded engine on {device}, {precision}; decoding steps {how}"
