"""Routing capture: what the model's own routers chose, while it generates.

Runs inside the embedded rollout engine. Forward hooks on the router modules read the expert ids of every row of
every forward pass, prompts included; nothing is computed a second time, because a second pass may route
differently. Shape legend: R = input rows of a pass (pads included), L = MoE layers, K = experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moerl.contract.trajectory import ModelSpec
from moerl.errors import EngineError

_ROUTERS: dict[type[nn.Module], Callable[[Any], Tensor]] = {
    # forward returns (logits, scores, indices)
    Qwen3MoeTopKRouter: lambda output: output[2],
}
"""How to read the expert ids, int64 [R, K], from the output of each known router class."""


class RoutingCapture:
    """Hooks on the routers of one model, in the order of its MoE layers (dense layers have none).

    Raises:
        EngineError: The model's routers are unknown, or do not match the spec.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        routers = [module for module in model.modules() if isinstance(module, tuple(_ROUTERS))]
        _check_routers(routers, model, spec)
        self._spec = spec
        self._seen: list[list[Tensor]] = [[] for _ in routers]
        self._handles = [
            router.register_forward_hook(partial(self._record, layer, _reader(router)))
            for layer, router in enumerate(routers)
        ]

    def _record(self, layer: int, read: Callable[[Any], Tensor], *hook_args: Any) -> None:
        self._seen[layer].append(read(hook_args[-1]))

    def begin(self) -> None:
        """Forgets earlier passes; call before each forward pass."""
        for seen in self._seen:
            seen.clear()

    def take(self, num_rows: int) -> Tensor:
        """The expert ids of the pass since `begin`: int64 [R, L, K].

        Raises:
            EngineError: A router did not run exactly once, or not on num_rows rows.
        """
        wanted = (num_rows, self._spec.experts_per_token)
        shapes = [[tuple(ids.shape) for ids in seen] for seen in self._seen]
        for layer, shape in enumerate(shapes):
            if shape != [wanted]:
                raise EngineError(
                    f"routing capture: MoE layer {layer} of {len(shapes)} did not report every row exactly once",
                    seen=f"expert ids of shapes {shape}",
                    expected=f"one tensor of shape {wanted}",
                    remedy="a fused or compiled path bypasses the router module; run the model eagerly",
                )
        ids_RLK = torch.stack([seen[0] for seen in self._seen], dim=1)
        self.begin()
        return ids_RLK

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self.begin()


def _reader(router: nn.Module) -> Callable[[Any], Tensor]:
    return next(read for cls, read in _ROUTERS.items() if isinstance(router, cls))


def _check_routers(routers: list[nn.Module], model: nn.Module, spec: ModelSpec) -> None:
    if not routers:
        raise EngineError(
            "routing capture: the model has no known router",
            seen=type(model).__name__,
            expected=f"routers of class {', '.join(cls.__name__ for cls in _ROUTERS)}",
            remedy="use a supported mixture-of-experts model, or add its router to moerl/rollout/capture.py",
        )
    found = [(router.num_experts, router.top_k) for router in routers]
    wanted = [(spec.num_experts, spec.experts_per_token)] * spec.num_moe_layers
    if found != wanted:
        raise EngineError(
            "routing capture: the model's routers do not match the spec",
            seen=f"{len(found)} MoE layers with (experts, top-k) {sorted(set(found), key=str)}",
            expected=f"{spec.num_moe_layers} with {(spec.num_experts, spec.experts_per_token)}",
            remedy="compute the spec from this model's own config (moerl.contract.spec)",
        )
