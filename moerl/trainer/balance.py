"""Load balancing of experts in RL: the load-balancing loss, and the bias of experts.

Runs in every trainer rank. Both count the routing that was dispatched (recorded routes on rows for which they are
enforced, the router's own on others) and no pad row. Megatron-Core 0.19.2 has its loss count the router's natural
choice, its counters of the bias combine a map [T, E] with a pad mask [T] that does not broadcast over it, and its
update of the bias comes before it is known whether the optimizer will skip the step.

Switch loss (Fedus, Zoph and Shazeer, JMLR 2022), per MoE layer and microbatch of T rows and E experts:

    loss = coef * E / (K * T^2) * sum_e  (rows routed to e) * (sum over rows of the normalised score of e)

Bias of experts (Wang et al., Auxiliary-Loss-Free Load Balancing, 2024), once per applied update:

    bias_e += rate * sign(mean_e(count) - count_e)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

EXPERT_BIAS_RATE = 1e-3
"""Step of the bias per update, as in DeepSeek-V3."""


def routers_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Returns the routers of this rank's model chunks, in the order of their layers."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [layer.router for chunk in modules for layer in chunk.modules() if isinstance(layer, MoELayer)]


def install(modules: Sequence[nn.Module]) -> None:
    """Makes every router of a freshly built model count dispatched rows, and leaves its bias to `update_expert_bias`.

    Call once, before the first forward pass.
    """
    for router in routers_of(modules):
        router.routing = MethodType(_routing, router)
        router.frozen_expert_bias = True


def _routing(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Does Megatron's top-k routing, with a load-balancing loss over the rows that are dispatched.

    Args:
        logits: [t, 1, E]. padding_mask: bool [t, 1], True for pad rows.

    Returns:
        Weights [t, E] and the routing map, bool [t, E].
    """
    from megatron.core.transformer.moe import moe_utils

    config = router.config
    logits_tE = logits.view(-1, config.num_moe_experts)
    probs_tE, map_tE = moe_utils.topk_routing_with_score_function(
        logits_tE,
        router.topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
        router_replay=router.router_replay,
    )
    if router.training and torch.is_grad_enabled() and router.is_aux_loss_enabled():
        pad_t = None if padding_mask is None else padding_mask.reshape(-1)
        _, scores_tE = moe_utils.compute_routing_scores_for_aux_loss(
            logits_tE, router.topk, router.score_function, padding_mask=pad_t
        )
        counted_tE = map_tE if pad_t is None else map_tE & ~pad_t[:, None]
        probs_tE = router._apply_aux_loss(probs_tE, scores_tE, counted_tE, with_padding_mask=pad_t is not None)
    return probs_tE, map_tE


@torch.no_grad()
def update_expert_bias(modules: Sequence[nn.Module], expert_load_RE: Tensor) -> None:
    """Moves the bias of every router of this rank by one step towards equal load. A collective of all ranks.

    Call after an update was applied, never after a skipped one.

    Args:
        expert_load_RE: rows per expert that this rank dispatched in the forward passes of the step, pad rows left out,
            one row per router in the order of `routers_of`.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    routers = [router for router in routers_of(modules) if router.expert_bias is not None]
    if not routers:
        return
    biases_RE = torch.stack([router.expert_bias for router in routers])
    # float64 counts exactly, and this sum is over all ranks.
    load_RE = expert_load_RE.to(device=biases_RE.device, dtype=torch.float64)
    group: Any = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    updated_RE = get_updated_expert_bias(load_RE, biases_RE, EXPERT_BIAS_RATE, tp_dp_cp_group=group)
    for router, bias_E in zip(routers, updated_RE, strict=True):
        router.expert_bias.copy_(bias_E)


@contextlib.contextmanager
def float32_expert_bias(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keeps every bias in float32, bit for bit, around `Float16Module`, which casts buffers.

    Megatron casts a bias back at the next forward pass, when it has been rounded already.
    """
    routers = [router for router in routers_of(modules) if router.expert_bias is not None]
    kept = [router.expert_bias.clone() for router in routers]
    yield
    for router, bias_E in zip(routers, kept, strict=True):
        router.expert_bias.data = bias_E.to(router.expert_bias.device)
