"""Types and building blocks of algorithms, in one place. Loads torch.

A built-in algorithm imports it inside its methods, because its settings are read before torch is loaded. A loss of a
user's own imports it as usual: ``from moerl.algorithms.toolbox import PolicyLoss, token_mean``.
"""

from torch import Tensor

from moerl.algorithms.advantages import group_advantages, less_when_overlong, pass_at_k_advantages, whitened
from moerl.algorithms.covariance import covariances, mean_facts, row_covariances
from moerl.algorithms.credit import CreditUnits, credit_units
from moerl.algorithms.importance import (
    Bounds,
    importance_weights,
    on_policy_enough,
    within_band,
)
from moerl.algorithms.kl import k3_estimate, kl_penalty
from moerl.algorithms.losses import (
    TokenLosses,
    binary_divergence,
    clipped_policy_loss,
    clipped_surrogate,
    gated_policy_loss,
    log_ratio,
)
from moerl.algorithms.policy import Algorithm, PolicyLoss, PolicyObjective, PolicyRows, RewardedBatch, SampledTokens
from moerl.algorithms.ratios import bounded
from moerl.algorithms.reduction import reduced, token_mean
from moerl.contract.batch import BatchTotals

__all__ = [
    "Algorithm",
    "BatchTotals",
    "Bounds",
    "CreditUnits",
    "PolicyLoss",
    "PolicyObjective",
    "PolicyRows",
    "RewardedBatch",
    "SampledTokens",
    "Tensor",
    "TokenLosses",
    "binary_divergence",
    "bounded",
    "clipped_policy_loss",
    "clipped_surrogate",
    "covariances",
    "credit_units",
    "gated_policy_loss",
    "group_advantages",
    "importance_weights",
    "k3_estimate",
    "kl_penalty",
    "less_when_overlong",
    "log_ratio",
    "mean_facts",
    "on_policy_enough",
    "pass_at_k_advantages",
    "reduced",
    "row_covariances",
    "token_mean",
    "whitened",
    "within_band",
]
