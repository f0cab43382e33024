"""What algorithms are made of, in one place: types of the seam and building blocks. Loads torch.

A built-in algorithm imports it inside its methods, because its settings are read before torch is loaded. A loss of a
user's own imports it as usual: ``from moerl.algorithms.toolbox import PolicyLoss, token_mean``.
"""

from torch import Tensor

from moerl.algorithms.advantages import group_advantages
from moerl.algorithms.importance import truncated_importance_weights
from moerl.algorithms.kl import k3_estimate, kl_penalty
from moerl.algorithms.losses import TokenLosses, clipped_policy_loss
from moerl.algorithms.policy import Algorithm, PolicyLoss, PolicyObjective, PolicyRows, RewardedBatch
from moerl.algorithms.ratios import bounded
from moerl.algorithms.reduction import token_mean
from moerl.contract.batch import BatchTotals

__all__ = [
    "Algorithm",
    "BatchTotals",
    "PolicyLoss",
    "PolicyObjective",
    "PolicyRows",
    "RewardedBatch",
    "Tensor",
    "TokenLosses",
    "bounded",
    "clipped_policy_loss",
    "group_advantages",
    "k3_estimate",
    "kl_penalty",
    "token_mean",
    "truncated_importance_weights",
]
