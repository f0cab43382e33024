"""Types and building blocks of algorithms, in one place. Loads torch.

A built-in algorithm imports it inside its methods, because its settings are read before torch is loaded. A loss of a
user's own imports it as usual: ``from moerl.algorithms.toolbox import PolicyLoss, token_mean``.
"""

from torch import Tensor

from moerl.algorithms.advantages import (
    CreditUnits,
    credit_units,
    group_advantages,
    less_when_overlong,
    pass_at_k_advantages,
    whitened,
)
from moerl.algorithms.covariance import covariances, mean_facts, row_covariances
from moerl.algorithms.importance import importance_weights, on_policy_enough, within_band
from moerl.algorithms.losses import (
    TokenLosses,
    binary_divergence,
    bounded,
    clipped_policy_loss,
    k3_estimate,
    kl_penalty,
    log_ratio,
    reduced,
    token_mean,
)
from moerl.algorithms.policy import PolicyLoss, PolicyRows, RewardedBatch, SampledTokens
from moerl.contract.batch import BatchTotals

__all__ = [
    "BatchTotals",
    "CreditUnits",
    "PolicyLoss",
    "PolicyRows",
    "RewardedBatch",
    "SampledTokens",
    "Tensor",
    "TokenLosses",
    "binary_divergence",
    "bounded",
    "clipped_policy_loss",
    "covariances",
    "credit_units",
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
