"""GRPO with decoupled clipping, truncated importance sampling and an exact KL penalty. Runs in trainer
processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.advantages import group_advantages
from moerl.algorithms.importance import truncated_importance_weights
from moerl.algorithms.kl import kl_penalty
from moerl.algorithms.losses import PolicyLossInputs, clipped_policy_loss
from moerl.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """What an algorithm makes of a microbatch.

    loss_T: float32, differentiable, 0 where masked. clipped_T: bool; True where clipping cut the gradient.
    importance_weights_T: float32; the weights used.
    """

    loss_T: Tensor
    clipped_T: Tensor
    importance_weights_T: Tensor


@dataclass(frozen=True, slots=True)
class GRPO:
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    Per token, `-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef KL`; reduced by `token_mean`.

    clip_low, clip_high: bounds of the ratio; asymmetric as in DAPO (arXiv:2503.14476).
    normalize_std: divide advantages by the group's deviation; False is Dr. GRPO (arXiv:2503.20783).
    importance_cap: upper bound of the weights `w` of trainer over rollout.
    kl_coef: weight of the exact KL to the reference; 0 needs no reference.

    Raises `ConfigError` where a value lies outside its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_std: bool = True
    importance_cap: float = 2.0
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _require("clip_low", self.clip_low, 0.0 < self.clip_low <= 1.0, "0 < clip_low <= 1")
        _require("clip_high", self.clip_high, 0.0 < self.clip_high < math.inf, "0 < clip_high, finite")
        _require("importance_cap", self.importance_cap, 1.0 <= self.importance_cap < math.inf, "1 or more, finite")
        _require("kl_coef", self.kl_coef, 0.0 <= self.kl_coef < math.inf, "0 or more, finite")

    @property
    def needs_reference(self) -> bool:
        """True where `PolicyLossInputs.kl_T` must be given."""
        return self.kl_coef > 0.0

    def advantages(self, rewards_B: Tensor, group_index_B: Tensor) -> Tensor:
        """float32 [B]: `group_advantages` of float rewards [B] in groups given by int64 indices [B]."""
        return group_advantages(rewards_B, group_index_B, normalize_std=self.normalize_std)

    def token_losses(self, inputs: PolicyLossInputs) -> TokenLosses:
        """Losses of one microbatch. Raises `ConfigError` where the KL is asked for and not given."""
        weights_T = truncated_importance_weights(
            inputs.proximal_logprobs_T, inputs.rollout_logprobs_T, self.importance_cap
        )
        policy = clipped_policy_loss(inputs, weights_T, self.clip_low, self.clip_high)
        loss_T = policy.loss_T
        if self.needs_reference:
            if inputs.kl_T is None:
                raise ConfigError(
                    "algorithm.kl_coef: the microbatch carries no KL to the reference",
                    seen=f"kl_coef={self.kl_coef} and kl_T=None",
                    expected="the exact KL per token",
                    remedy="configure a reference model, or set algorithm.kl_coef to 0",
                )
            loss_T = kl_penalty(loss_T, inputs.kl_T, inputs.loss_mask_T, self.kl_coef)
        return TokenLosses(loss_T, policy.clipped_T, weights_T)


def _require(name: str, value: float, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(
            f"algorithm.{name} is out of range",
            seen=value,
            expected=expected,
            remedy="see docs/algorithms.md for the meaning and the default",
        )
