"""Losses per token, their KL terms, and their reduction to the number that is differentiated. Runs in trainer
processes, once per microbatch; metrics of the controller use two of the functions.

The KL penalty is exact (`moerl.kernels`: a sum over the kept set or over the full vocabulary). `k3_estimate` serves
metrics, for which only the log-probs of the sampled tokens are at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moerl.algorithms.policy import PolicyRows
from moerl.contract.reasons import Reason
from moerl.errors import ConfigError, ContractError

_HEADROOM = 0.8
"""Share of the largest exponent that is used: sums of such ratios, and products with numbers up to 5e7, stay finite."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """Policy loss of each token of a microbatch."""

    loss_T: Tensor
    """float32, differentiable; 0 on untrained tokens."""
    clipped_T: Tensor
    """bool; True if clipping cut the token's gradient, or its weight (CISPO)."""


def log_ratio(rows: PolicyRows) -> Tensor:
    """Returns `trainer_logprobs - proximal_logprobs`, float32 [T] with gradient; 0 on untrained tokens.

    Masked before any exponential: values on untrained rows do not reach the gradient.
    """
    difference_T = rows.trainer_logprobs_T - rows.proximal_logprobs_T.detach()
    return difference_T.masked_fill(~rows.loss_mask_T, 0.0)


def clipped_policy_loss(
    rows: PolicyRows,
    importance_weights_T: Tensor,
    log_ratio_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """Returns `-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(log_ratio)`, `bounded`.

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with separate bounds (clip-higher:
    DAPO, Yu et al. 2025, arXiv:2503.14476), weighted by the detached importance weights `w` of the proximal
    policy over the rollout's (`moerl.algorithms.importance`). With `dual_clip` c the objective of a token with A < 0 is
    at least `c A` (Ye et al. 2020, arXiv:1912.09729).

    Args:
        rows: the microbatch.
        importance_weights_T: float32; no gradient flows through them.
        log_ratio_T: float32; each token's own (`log_ratio`), or its response's.
        clip_low, clip_high: how far the ratio may fall below and rise above 1 before its gradient stops.
    """
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


def kl_penalty(loss_T: Tensor, rows: PolicyRows, kl_coef: float) -> Tensor:
    """Returns `loss + kl_coef * KL` per token with the exact KL of `rows`; adds 0 on untrained tokens.

    Raises:
        ConfigError: the rows carry no KL.
    """
    if rows.kl_T is None:
        raise ConfigError(
            "algorithm.kl_coef: the microbatch carries no KL to the reference",
            seen=f"kl_coef={kl_coef} and kl_T=None",
            expected="the exact KL per token",
            remedy="configure a reference model, or set algorithm.kl_coef to 0",
        )
    return loss_T + kl_coef * rows.kl_T.masked_fill(~rows.loss_mask_T, 0.0)


def k3_estimate(sampler_logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """Estimates KL(sampler || other) from tokens drawn by the sampler: `exp(d) - 1 - d`, bounded `d = other - sampler`.

    Schulman's k3 (2020, "Approximating KL divergence"): never negative, low variance, unbiased if `other`'s support
    lies within the sampler's. If the sampler was truncated and `other` is not, it is biased: tokens that were cut are
    never drawn.
    """
    difference_T = bounded(other_logprobs_T - sampler_logprobs_T)
    return torch.expm1(difference_T) - difference_T


def token_mean(loss_T: Tensor, loss_mask_T: Tensor, denominator: float) -> Tensor:
    """Returns `sum of loss over trained tokens / denominator`.

    With the same denominator everywhere, the sum of the results over all microbatches and data-parallel ranks is
    the mean over all trained tokens of the batch, so the gradient depends neither on packing nor on layout
    (token-level loss: DAPO, Yu et al. 2025, arXiv:2503.14476). Gradients are to be summed, not averaged,
    over ranks.

    Args:
        loss_T: float. loss_mask_T: bool; True on trained tokens.
        denominator: number of trained tokens of the whole batch, over all microbatches and data-parallel
            ranks.

    Raises:
        ContractError: the denominator is not positive.
    """
    if not denominator > 0:
        raise ContractError(
            Reason.NO_TRAINED_TOKEN,
            field="loss_mask",
            seen=f"denominator {denominator}",
            expected="at least one trained token in the batch",
            remedy="skip a batch that has nothing to train on before the forward pass",
        )
    return loss_T.masked_fill(~loss_mask_T, 0.0).sum() / denominator


def reduced(
    loss_T: Tensor, rows: PolicyRows, how: Literal["token_mean", "sequence_mean", "constant"], length: int | None
) -> Tensor:
    """Returns this rank's part of the loss of the batch; parts are added over microbatches and ranks.

    token_mean: `sum of loss / trained tokens`. sequence_mean: the mean over responses of the mean over their
    tokens (GRPO as first published, GSPO). constant: `sum of loss / (responses x length)`, so that a token weighs the
    same in every response and every batch (Dr. GRPO, arXiv:2503.20783). Tokens and responses are those of the whole
    batch.

    Raises:
        ContractError: nothing is trained.
    """
    match how:
        case "token_mean":
            return token_mean(loss_T, rows.loss_mask_T, rows.totals.num_tokens)
        case "sequence_mean":
            return token_mean(loss_T / rows.sequence_lengths(), rows.loss_mask_T, rows.totals.num_sequences)
        case "constant":
            return token_mean(loss_T, rows.loss_mask_T, rows.totals.num_sequences * (length or 0))


def bounded(log_ratio_T: Tensor) -> Tensor:
    """Returns `min(log_ratio, L)`, whose gradient is that of the log-ratio itself.

    L is 0.8 times the largest number whose exponential the dtype holds: 70.97 in float32, 567.8 in float64. An
    exponential that overflows is infinite, and infinity times the 0 of a clipped or masked gradient is NaN. The
    exponential of a bounded log-ratio and its gradient, which are equal, stay at exp(L) instead; smaller log-ratios
    come back bit for bit. NaN stays NaN.
    """
    return _Bounded.apply(log_ratio_T)  # type: ignore[return-value]


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_ratio_T: Tensor) -> Tensor:
        return log_ratio_T.clamp(max=_HEADROOM * math.log(torch.finfo(log_ratio_T.dtype).max))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
