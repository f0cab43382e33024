"""Distance of the trainer's log-probs from the engine's, for the same tokens and the same weights.

Runs in trainer processes. Sums and maxima are additive over microbatches and ranks; quantiles come from a
sample of ratios gathered from all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.kl import k3_estimate
from moerl.algorithms.ratios import bounded

FAR_LOG_RATIO = math.log(2.0)
"""A token whose probabilities differ by more than a factor of 2 counts as far off."""

NEAR_RATIOS = (0.9, 1.1)
"""A token whose ratio lies outside of this counts as one that importance weights would change."""


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Additive description of `d = trainer_logprobs - rollout_logprobs` of tokens, bounded before `exp`."""

    num_tokens: float = 0.0
    """Tokens counted."""
    abs_sum: float = 0.0
    """Sum of |d|, nats."""
    abs_max: float = 0.0
    """Maximum of |d|, nats."""
    k3_sum: float = 0.0
    """Sum of `exp(d) - 1 - d`, nats."""
    ratio_sum: float = 0.0
    """Sum of exp(d)."""
    num_far: float = 0.0
    """Tokens with |d| > ln 2."""
    num_outside: float = 0.0
    """Tokens with exp(d) outside of `NEAR_RATIOS`."""

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.num_tokens + other.num_tokens,
            self.abs_sum + other.abs_sum,
            max(self.abs_max, other.abs_max),
            self.k3_sum + other.k3_sum,
            self.ratio_sum + other.ratio_sum,
            self.num_far + other.num_far,
            self.num_outside + other.num_outside,
        )

    def finalize(self) -> dict[str, float]:
        """Returns means, maximum and shares by metric name; nothing if no token was counted."""
        if not self.num_tokens:
            return {}
        return {
            "mismatch_abs_mean": self.abs_sum / self.num_tokens,
            "mismatch_abs_max": self.abs_max,
            "mismatch_k3": self.k3_sum / self.num_tokens,
            "mismatch_ratio_mean": self.ratio_sum / self.num_tokens,
            "mismatch_far_share": self.num_far / self.num_tokens,
            "mismatch_outside_share": self.num_outside / self.num_tokens,
        }


def mismatch_sums(trainer_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor) -> MismatchSums:
    """Returns the sums of one microbatch, over tokens whose `mask_T` (bool) is True; one transfer to the host.

    The k3 mean estimates KL(rollout || trainer) (`moerl.algorithms.kl.k3_estimate`).
    """
    trainer, rollout = trainer_logprobs_T.detach()[mask_T].double(), rollout_logprobs_T[mask_T].double()
    if not len(trainer):
        return MismatchSums()
    difference = trainer - rollout
    distance, ratio = difference.abs(), bounded(difference).exp()
    low, high = NEAR_RATIOS
    sums = torch.stack(
        [
            distance.sum(),
            distance.max(),
            k3_estimate(rollout, trainer).sum(),
            ratio.sum(),
            (distance > FAR_LOG_RATIO).double().sum(),
            ((ratio < low) | (ratio > high)).double().sum(),
        ]
    )
    return MismatchSums(float(len(trainer)), *sums.tolist())


def ratio_sample(trainer_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, max_samples: int) -> Tensor:
    """Returns the ratios `exp(trainer - rollout)` of at most `max_samples` tokens of the mask, evenly spaced: float32,
    detached."""
    ratios = bounded((trainer_logprobs_T.detach() - rollout_logprobs_T)[mask_T].float()).exp()
    stride = max(1, math.ceil(len(ratios) / max_samples))
    return ratios[::stride]


def ratio_quantiles(ratios: Tensor) -> dict[str, float]:
    """Returns quantiles 0.01, 0.5 and 0.99 of a gathered sample of ratios; nothing for an empty one."""
    if not len(ratios):
        return {}
    levels = ratios.new_tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    quantiles = torch.quantile(ratios.double(), levels).tolist()
    return dict(zip(("mismatch_ratio_p01", "mismatch_ratio_p50", "mismatch_ratio_p99"), quantiles, strict=True))
