"""Per-token policy losses. Runs in trainer processes, once per microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moerl.algorithms.policy import PolicyRows
from moerl.algorithms.ratios import bounded


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """Policy loss of each token of a microbatch."""

    loss_T: Tensor
    """float32, differentiable; 0 on untrained tokens."""
    clipped_T: Tensor
    """bool; True if clipping cut the token's gradient."""


def log_ratio(rows: PolicyRows) -> Tensor:
    """Returns `trainer_logprobs - proximal_logprobs`, float32 [T] with gradient; 0 on untrained tokens.

    Masked before any exponential: values on untrained rows do not reach the gradient.
    """
    difference_T = rows.trainer_logprobs_T - rows.proximal_logprobs_T.detach()
    return difference_T.masked_fill(~rows.loss_mask_T, 0.0)


def clipped_policy_loss(
    rows: PolicyRows,
    importance_weights_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """Returns `-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(trainer_logprobs -
    proximal_logprobs)`, bounded (`moerl.algorithms.ratios`).

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with separate bounds (clip-higher:
    DAPO, Yu et al. 2025, arXiv:2503.14476), weighted by the detached importance weights `w` of the proximal
    policy over the rollout's (`moerl.algorithms.importance`). With `dual_clip` c the objective of a token with A < 0 is
    at least `c A` (Ye et al. 2020, arXiv:1912.09729).

    Args:
        rows: the microbatch.
        importance_weights_T: float32; no gradient flows through them.
        clip_low, clip_high: how far the ratio may fall below and rise above 1 before its gradient stops.
    """
    return clipped_surrogate(rows, importance_weights_T, log_ratio(rows), clip_low, clip_high, dual_clip)


def clipped_surrogate(
    rows: PolicyRows,
    importance_weights_T: Tensor,
    log_ratio_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """Returns `clipped_policy_loss` of ratios given by their logarithms, float32 [T]: each token's own, or its
    response's."""
    mask_T = rows.loss_mask_T
    # On untrained rows, too: the gradient of a response's ratio is the sum of those of all its rows.
    advantages_T = rows.advantages_T.detach().masked_fill(~mask_T, 0.0)
    ratio_T = bounded(log_ratio_T).exp()
    unclipped_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    objective_T, cut_T = torch.minimum(unclipped_T, clipped_T), clipped_T < unclipped_T
    if dual_clip is not None:
        least_T = dual_clip * advantages_T
        too_far_T = (advantages_T < 0.0) & (objective_T < least_T)
        objective_T, cut_T = torch.where(too_far_T, least_T, objective_T), cut_T | too_far_T
    loss_T = -importance_weights_T.detach() * objective_T
    return TokenLosses(loss_T.masked_fill(~mask_T, 0.0), cut_T.detach() & mask_T)


@torch.no_grad()
def binary_divergence(rows: PolicyRows, kind: Literal["tv", "kl"]) -> tuple[Tensor, Tensor]:
    """Returns how far each token has moved from the sampler, as one id against all others: both float32 [T].

    First p - q with p of the weights being trained and q of the sampler, then `|p - q|` (tv) or
    `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` (kl), which is infinite if p is 1 and q is not. 0 on untrained
    tokens.
    """
    trainer_T = rows.trainer_logprobs_T.masked_fill(~rows.loss_mask_T, 0.0)
    rollout_T = rows.rollout_logprobs_T.masked_fill(~rows.loss_mask_T, 0.0)
    # A log-prob above 0 is rounding.
    p_T, q_T = trainer_T.exp().clamp(max=1.0), rollout_T.exp().clamp(max=1.0)
    if kind == "tv":
        return p_T - q_T, (p_T - q_T).abs()
    others_T = torch.special.xlogy(1.0 - q_T, 1.0 - q_T) - torch.special.xlogy(1.0 - q_T, 1.0 - p_T)
    return p_T - q_T, q_T * (rollout_T - trainer_T) + others_T


def gated_policy_loss(
    rows: PolicyRows, importance_weights_T: Tensor, tau_positive: float, tau_negative: float
) -> TokenLosses:
    """Returns `-w 4 / tau sigmoid(tau (r - 1)) A`, tau by the sign of A: SAPO (Gao et al. 2025, arXiv:2511.20347).

    Arguments as for `clipped_policy_loss`. Nothing counts as clipped.
    """
    mask_T = rows.loss_mask_T
    advantages_T = rows.advantages_T.detach().masked_fill(~mask_T, 0.0)
    tau_T = torch.full_like(advantages_T, tau_negative).masked_fill(advantages_T > 0.0, tau_positive)
    gate_T = (tau_T * (bounded(log_ratio(rows)).exp() - 1.0)).sigmoid() * 4.0 / tau_T
    loss_T = -importance_weights_T.detach() * gate_T * advantages_T
    return TokenLosses(loss_T.masked_fill(~mask_T, 0.0), torch.zeros_like(mask_T))
