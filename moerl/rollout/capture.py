"""Routing capture: what the model's own routers chose, while it generates.

Runs inside the embedded rollout engine, and in `moerl.rollout.enforce`. Hooks before the experts read the
expert ids of every row of every forward pass, prompts included; nothing is computed a second time, because a second
pass may route differently. Shape legend: R = input rows of a pass (pads included), L = MoE layers, K = experts per
token.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moerl.contract.trajectory import ModelSpec
from moerl.errors import EngineError
from moerl.models.families import FAMILIES
from moerl.models.family import Family


def family_of_model(model: PreTrainedModel) -> Family | None:
    """Returns the record of a live model's family; None if moerl knows none."""
    return FAMILIES.get(model.config.model_type)


def experts_class(family: Family) -> type[nn.Module]:
    """Returns the class of the experts modules, one per MoE layer: their inputs are what the router chose, whichever
    module chose it."""
    module, name = family.experts_class.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def experts_by_layer(model: PreTrainedModel) -> dict[int, Any]:
    """Returns the experts modules of a live model by number of decoder layer; none if its family is unknown."""
    family = family_of_model(model)
    if family is None:
        return {}
    wanted, layers = experts_class(family), cast(Any, model.base_model).layers
    return {
        number: module
        for number, layer in enumerate(layers)
        for module in layer.modules()
        if isinstance(module, wanted)
    }


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules that choose experts, in the order of the layers; none if the model's family is unknown."""
    family = family_of_model(model)
    if family is None:
        return []
    wanted = experts_class(family)
    return [m.gate for m in cast(Any, model.modules()) if isinstance(getattr(m, "experts", None), wanted)]


class RoutingCapture:
    """Hooks on the experts of one model, in the order of its MoE layers (dense layers have none).

    Attributes:
        layer_numbers: per MoE layer, the number of its decoder layer in the live model, from 0.

    Raises:
        EngineError: The model's MoE layers are unknown, or do not match the spec.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        found = experts_by_layer(model)
        experts = list(found.values())
        if not experts:
            raise EngineError(
                "routing capture: the model has no known router",
                seen=type(model).__name__,
                expected=f"a model of type {', '.join(FAMILIES)}",
                remedy="use a supported mixture-of-experts model, or add its family to moerl/models/families",
            )
        experts_per_token = getattr(model.config, "num_experts_per_tok", None)
        sizes = [(module.num_experts, experts_per_token) for module in experts]
        wanted = [(spec.num_experts, spec.experts_per_token)] * spec.num_moe_layers
        if sizes != wanted:
            raise EngineError(
                "routing capture: the model's routers do not match the spec",
                seen=f"{len(sizes)} MoE layers with (experts, top-k) {sorted(set(sizes), key=str)}",
                expected=f"{spec.num_moe_layers} with {(spec.num_experts, spec.experts_per_token)}",
                remedy="compute the spec from this model's own config (moerl.models.spec)",
            )
        self._spec = spec
        self._seen: list[list[Tensor]] = [[] for _ in experts]
        self.layer_numbers = tuple(found)
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
        """Returns the expert ids of the pass since `begin`: int64 [R, L, K].

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
