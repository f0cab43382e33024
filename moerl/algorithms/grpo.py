"""GRPO with decoupled clipping, truncated importance sampling and an exact KL penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.algorithms.section import AlgorithmSection
from moerl.sections import NonNegative, Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyLoss, PolicyRows, RewardedBatch, Tensor


class GRPO(AlgorithmSection):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    Per token, `-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef KL`, averaged over all trained tokens of
    the batch. Asymmetric bounds: DAPO (arXiv:2503.14476). Without `normalize_std`: Dr. GRPO (arXiv:2503.20783).
    """

    name: Literal["grpo"] = Field(description="Algorithm.")
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Ratios below 1 - clip_low are clipped.")
    clip_high: Positive = Field(description="Ratios above 1 + clip_high are clipped.")
    normalize_std: bool = Field(description="Divide advantages by the standard deviation of their group.")
    importance_cap: Annotated[float, Field(ge=1.0)] = Field(
        description="Cap of the truncated importance weight between sampler and trainer, at least 1."
    )
    kl_coef: NonNegative = Field(
        description="Weight of the exact KL to the starting model in the loss; 0 = no reference model."
    )
    kl_support: Literal["kept", "full"] = Field(
        description="Ids that the KL sums over: kept = each token's kept set, both models renormalised inside it (the"
        " full vocabulary if nothing was cut); full = always the full vocabulary."
    )

    @property
    def reference_kl(self) -> Literal["kept", "full"] | None:
        return self.kl_support if self.kl_coef > 0.0 else None

    def compute_advantages(self, batch: RewardedBatch) -> Tensor:
        from moerl.algorithms.toolbox import group_advantages

        return group_advantages(batch.rewards_B, batch.group_index_B, normalize_std=self.normalize_std)

    def compute_loss(self, rows: PolicyRows) -> PolicyLoss:
        from moerl.algorithms import toolbox

        weights_T = toolbox.truncated_importance_weights(
            rows.proximal_logprobs_T, rows.rollout_logprobs_T, self.importance_cap
        )
        clipped = toolbox.clipped_policy_loss(rows, weights_T, self.clip_low, self.clip_high)
        losses_T = clipped.loss_T
        if self.kl_coef > 0.0:
            losses_T = toolbox.kl_penalty(losses_T, rows, self.kl_coef)
        loss = toolbox.token_mean(losses_T, rows.loss_mask_T, rows.totals.num_tokens)
        return toolbox.PolicyLoss(loss, losses_T, clipped.clipped_T)
