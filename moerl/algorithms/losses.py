"""Per-token policy losses. Runs in trainer processes, once per microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.policy import PolicyRows
from moerl.algorithms.ratios import bounded


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """loss_T: float32, differentiable, 0 where masked. clipped_T: bool; True where clipping cut the gradient."""

    loss_T: Tensor
    clipped_T: Tensor


def clipped_policy_loss(
    rows: PolicyRows, importance_weights_T: Tensor, clip_low: float, clip_high: float
) -> TokenLosses:
    """`-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(trainer_logprobs -
    proximal_logprobs)`, bounded (`moerl.algorithms.ratios`).

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with separate bounds (clip-higher:
    DAPO, Yu et al. 2025, arXiv:2503.14476), weighted by the detached importance weights `w` of the proximal
    policy over the rollout's (`moerl.algorithms.importance`).

    Args:
        rows: the microbatch.
        importance_weights_T: float32; no gradient flows through them.
        clip_low, clip_high: how far the ratio may fall below and rise above 1 before its gradient stops.
    """
    mask_T = rows.loss_mask_T
    advantages_T = rows.advantages_T.detach()
    # Masked before the exponential: what stands on untrained rows does not reach the gradient.
    log_ratio_T = (rows.trainer_logprobs_T - rows.proximal_logprobs_T.detach()).masked_fill(~mask_T, 0.0)
    ratio_T = bounded(log_ratio_T).exp()
    unclipped_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    loss_T = -importance_weights_T.detach() * torch.minimum(unclipped_T, clipped_T)
    return TokenLosses(loss_T.masked_fill(~mask_T, 0.0), (clipped_T < unclipped_T).detach() & mask_T)
