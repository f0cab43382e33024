"""Importance weights that correct for the rollout engine sampling from another policy than the trainer's.

Runs in trainer processes. Engine and trainer differ in numerics and, with asynchronous rollouts, in version.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def truncated_importance_weights(proximal_logprobs_T: Tensor, rollout_logprobs_T: Tensor, cap: float) -> Tensor:
    """`min(exp(proximal_logprobs - rollout_logprobs), cap)`, detached: float [T].

    Truncated importance sampling (TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"). Both log-probs must be of the same support: the kept set each token was drawn
    from.
    """
    return (proximal_logprobs_T - rollout_logprobs_T).detach().exp().clamp(max=cap)


@dataclass(frozen=True, slots=True)
class ImportanceSums:
    """What describes the weights of a batch, additive over microbatches and ranks.

    num_tokens: tokens counted. num_capped: weights at the cap. weight_sum, weight_square_sum: sums of w and
        w^2.
    """

    num_tokens: float = 0.0
    num_capped: float = 0.0
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0

    def __add__(self, other: ImportanceSums) -> ImportanceSums:
        return ImportanceSums(
            self.num_tokens + other.num_tokens,
            self.num_capped + other.num_capped,
            self.weight_sum + other.weight_sum,
            self.weight_square_sum + other.weight_square_sum,
        )

    def finalize(self) -> dict[str, float]:
        """Mean weight, share of capped weights, effective sample size as a share of the tokens (0..1).

        The latter is `(sum w)^2 / (n sum w^2)`. Empty where no token was counted.
        """
        if not self.num_tokens:
            return {}
        return {
            "importance_mean": self.weight_sum / self.num_tokens,
            "importance_capped_share": self.num_capped / self.num_tokens,
            "importance_effective_share": self.weight_sum**2 / (self.num_tokens * self.weight_square_sum)
            if self.weight_square_sum
            else 0.0,
        }


def importance_sums(importance_weights_T: Tensor, loss_mask_T: Tensor, cap: float) -> ImportanceSums:
    """The sums of one microbatch over the tokens where `loss_mask_T` (bool) is True."""
    weights = importance_weights_T.detach()[loss_mask_T].double()
    sums = torch.stack([(weights >= cap).double().sum(), weights.sum(), weights.square().sum()]).tolist()
    return ImportanceSums(float(len(weights)), *sums)
