"""Importance weights that correct for the rollout engine sampling from another policy than the trainer's.

Runs in trainer processes. Engine and trainer differ in numerics and, with asynchronous rollouts, in version.
"""

from __future__ import annotations

from torch import Tensor

from moerl.algorithms.ratios import bounded


def truncated_importance_weights(proximal_logprobs_T: Tensor, rollout_logprobs_T: Tensor, cap: float) -> Tensor:
    """`min(exp(proximal_logprobs - rollout_logprobs), cap)`, detached: float [T].

    Truncated importance sampling (TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"). Both log-probs must be of the same support: the kept set each token was drawn
    from.
    """
    return bounded((proximal_logprobs_T - rollout_logprobs_T).detach()).exp().clamp(max=cap)
