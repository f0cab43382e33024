"""Routing capture: what the model's own routers chose, while it generates.

Runs inside the embedded rollout engine, and where `moerl.rollout.enforce` replays. Hooks before the experts read the
expert ids of every row of every forward pass, prompts included; nothing is computed a second time, because a second
pass may route differently. Shape legend: R = input rows of a pass (pads included), L = MoE layers, K = experts per
token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3NaiveMoe
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeNaiveMoe
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moerl.contract.trajectory import ModelSpec
from moerl.errors import EngineError

_EXPERTS: tuple[type[nn.Module], ...] = (Qwen3MoeExperts, DeepseekV3NaiveMoe, Glm4MoeNaiveMoe, OlmoeExperts)
"""Experts of the known families, one module per MoE layer. All are called as (hidden states [R, H], expert ids [R, K],
weights [R, K]): what they are given is what the router chose, whichever module chose it."""


class RoutingCapture:
    """Hooks on the experts of one model, in the order of its MoE layers (dense layers have none).

    Attributes:
        layer_numbers: per MoE layer, the number of its decoder layer in the live model, from 0.

    Raises:
        EngineError: The model's MoE layers are unknown, or do not match the spec.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        experts = [module for module in model.modules() if isinstance(module, _EXPERTS)]
        _check_experts(experts, model, spec)
        self._spec = spec
        self._seen: list[list[Tensor]] = [[] for _ in experts]
        self.layer_numbers = _layer_numbers(model)
        self._handles = [
            module.register_forward_pre_hook(partial(self._record, layer)) for layer, module in enumerate(experts)
        ]

    def _record(self, layer: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen[layer].append(inputs[1])

    def begin(self) -> None:
        """Forgets earlier passes; call before each forward pass."""
        for seen in self._seen:
            seen.clear()

    def take(self, num_rows: int) -> Tensor:
        """The expert ids of the pass since `begin`: int64 [R, L, K].

        Raises:
            EngineError: A layer did not run exactly once, or not on num_rows rows.
        """
        wanted = (num_rows, self._spec.experts_per_token)
        shapes = [[tuple(ids.shape) for ids in seen] for seen in self._seen]
        for layer, shape in enumerate(shapes):
            if shape != [wanted]:
                raise EngineError(
                    f"routing capture: MoE layer {layer} of {len(shapes)} did not report every row exactly once",
                    seen=f"expert ids of shapes {shape}",
                    expected=f"one tensor of shape {wanted}",
                    remedy="a fused or compiled path bypasses the experts module; run the model eagerly",
                )
        ids_RLK = torch.stack([seen[0] for seen in self._seen], dim=1)
        self.begin()
        return ids_RLK

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self.begin()


def _layer_numbers(model: PreTrainedModel) -> tuple[int, ...]:
    """Decoder layers with experts, found in the live model rather than in its config."""
    layers: Any = model.base_model.layers
    return tuple(
        number for number, layer in enumerate(layers) if any(isinstance(module, _EXPERTS) for module in layer.modules())
    )


def _check_experts(experts: list[Any], model: PreTrainedModel, spec: ModelSpec) -> None:
    if not experts:
        raise EngineError(
            "routing capture: the model has no known router",
            seen=type(model).__name__,
            expected=f"experts of class {', '.join(cls.__name__ for cls in _EXPERTS)}",
            remedy="use a supported mixture-of-experts model, or add its experts to moerl/rollout/capture.py",
        )
    experts_per_token = getattr(model.config, "num_experts_per_tok", None)
    found = [(module.num_experts, experts_per_token) for module in experts]
    wanted = [(spec.num_experts, spec.experts_per_token)] * spec.num_moe_layers
    if found != wanted:
        raise EngineError(
            "routing capture: the model's routers do not match the spec",
            seen=f"{len(found)} MoE layers with (experts, top-k) {sorted(set(found), key=str)}",
            expected=f"{spec.num_moe_layers} with {(spec.num_experts, spec.experts_per_token)}",
            remedy="compute the spec from this model's own config (moerl.contract.spec)",
        )
