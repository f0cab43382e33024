"""The routers of a live model: found once, refused if they bypass the replay hook, else tapped.

Runs in every trainer rank. A `RouterHook` sits in one router's `router_replay` and before its token dispatcher; the
open schedule (`moerl.trainer.replay`) decides what the hook does there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moerl.errors import ReplayError

OwnTopK = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Megatron's own choice: scores [T, E] -> (values, ids), both [T, K]."""


class RouterListener(Protocol):
    """Schedule that is open around a forward(-backward) pass; `RouterHook` calls it at every router."""

    def route(self, hook: RouterHook, scores_tE: Tensor, own_topk: OwnTopK) -> tuple[Tensor, Tensor]: ...

    def observe(self, hook: RouterHook, routing_map_tE: Tensor) -> None: ...


@dataclass(slots=True)
class RouterHook:
    """One tapped router."""

    index: int
    """Index among the hooks of this rank."""
    moe_layer: int
    """Index among all MoE layers of the model, from 0."""
    layer_number: int
    """Megatron's number of the layer, from 1."""
    schedule: RouterListener | None = None
    """Schedule that is open; None between schedules."""
    pending: deque[int] = field(default_factory=deque)
    """Microbatches whose recompute is still to come, oldest first."""
    active: tuple[int, int] | None = None
    """(microbatch, phase) of the last routing call; None once its rows were dispatched."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the choice from scores [T, E], as Megatron's hook: (values, ids), both [T, K]."""
        assert default_compute_topk is not None

        def own_topk(scores_TE: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)

        return own_topk(scores) if self.schedule is None else self.schedule.route(self, scores, own_topk)

    def before_dispatch(self, routing_map_TE: Tensor) -> None:
        if self.schedule is not None:
            self.schedule.observe(self, routing_map_TE)
            # One routing call, one dispatch: a bypass of the next call must not pass for this one.
            self.active = None

    def clear(self) -> None:
        self.schedule, self.active = None, None
        self.pending.clear()


def refuse_unsupported_routers(config: Any) -> None:
    """Raises `ReplayError` for router settings that return before the replay hook or drop tokens after it."""
    load_balancing = config.moe_router_load_balancing_type
    kinds = load_balancing if isinstance(load_balancing, list) else [load_balancing]
    problems = {
        "moe_router_fusion": config.moe_router_fusion,
        "moe_router_load_balancing_type": [k for k in kinds if k in ("sinkhorn", "quantile_balancing")],
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_router_force_load_balancing": config.moe_router_force_load_balancing,
    }
    for name, bad in problems.items():
        if bad:
            raise ReplayError(
                f"the router setting {name} cannot be combined with Keep Routing",
                seen=getattr(config, name),
                expected="plain top-k routing without capacity",
                remedy="change the setting; every keep_routing.mode observes routers",
            )


def hook_routers(chunks: Sequence[nn.Module], config: Any) -> list[RouterHook]:
    """Taps the routers of a live model's chunks, in the order of its layers.

    Layers are told apart by Megatron's layer number, which counts over the whole model whatever the pipeline; dense
    layers are left out by the model's layer pattern. Routers of multi-token prediction restart their numbers and are
    not part of the policy: they are bypassed.

    Raises:
        ReplayError: the routers bypass the hook, have one already, or are of a class other than `TopKRouter`, which
            asks the hook for every choice.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter

    refuse_unsupported_routers(config)
    # 1 for every MoE layer of the whole model, 0 for dense ones, by layer number; or one MoE layer in so many.
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(config.num_layers)]
    found: list[Any] = [layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, MoELayer)]
    for layer in found:
        if type(layer.router) is not TopKRouter:
            raise ReplayError(
                f"the router of layer {layer.layer_number} is of an unknown class",
                seen=type(layer.router).__name__,
                expected="TopKRouter, which asks the replay hook for every choice",
                remedy="use a model with plain top-k routers, or teach moerl/trainer/routers.py this class",
            )
    layers = [layer for layer in found if not layer.router.is_mtp_layer]
    hooks = [
        RouterHook(index, sum(pattern[: layer.layer_number - 1]), layer.layer_number)
        for index, layer in enumerate(layers)
    ]
    for hook, layer in zip(hooks, layers, strict=True):
        _install(hook, layer)
    return hooks


def _install(hook: RouterHook, layer: Any) -> None:
    if layer.router.router_replay is not None:
        raise ReplayError(
            f"the router of layer {layer.layer_number} has a replay hook already",
            seen=type(layer.router.router_replay).__name__,
            expected="none",
            remedy="leave Megatron's moe_enable_routing_replay off",
        )
    layer.router.router_replay = hook
    dispatcher = layer.token_dispatcher
    original = dispatcher.dispatch_preprocess

    def dispatch_preprocess(hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        if hook.schedule is not None:
            _refuse_dead_router(layer, probs)
        hook.before_dispatch(routing_map)
        return original(hidden_states, routing_map, probs)

    dispatcher.dispatch_preprocess = dispatch_preprocess


def _refuse_dead_router(layer: Any, probs_TE: Tensor) -> None:
    """Raises `ReplayError` if a router that should be trained would get no gradient: it gets one through the
    probabilities of its experts alone."""
    if torch.is_grad_enabled() and layer.router.weight.requires_grad and not probs_TE.requires_grad:
        raise ReplayError(
            f"the router of layer {layer.layer_number} is dead: it would get no gradient",
            seen="probabilities of experts that are cut off from the router's weights",
            expected="probabilities gathered from the router's own scores",
            remedy="look for what detaches them after the router; to freeze routers set trainer.train_router=false",
        )
