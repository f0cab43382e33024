"""Covariance of log-prob and advantage: how far each token moves the entropy. Means of batches are computed in
the controller, rows in trainer processes.

Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv:2505.22617): the
entropy falls with the covariance of log-probs and advantages, to which a few tokens add nearly all. Here with the
sampler's log-probs, whose batch means the controller knows before any pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.policy import PolicyRows, SampledTokens

MEAN_ADVANTAGE, MEAN_LOGPROB = "cov_mean_advantage", "cov_mean_logprob"


def covariances(advantages: Tensor, logprobs: Tensor, facts: dict[str, float]) -> Tensor:
    """Returns `(A - mean A) (log-prob - mean log-prob)`, with the means of the batch: shape as given."""
    return (advantages - facts[MEAN_ADVANTAGE]) * (logprobs - facts[MEAN_LOGPROB])


def mean_facts(tokens: SampledTokens) -> dict[str, float]:
    """Returns the means that `covariances` subtracts, by the names that it reads them under."""
    return {
        MEAN_ADVANTAGE: float(tokens.advantages_N.double().mean()),
        MEAN_LOGPROB: float(tokens.rollout_logprobs_N.double().mean()),
    }


@torch.no_grad()
def row_covariances(rows: PolicyRows) -> Tensor:
    """Returns `covariances` of the rows of a microbatch: float32 [T], -inf on untrained rows."""
    found_T = covariances(rows.advantages_T, rows.rollout_logprobs_T, dict(rows.totals.facts))
    return found_T.masked_fill(~rows.loss_mask_T, -torch.inf)
