"""CISPO: clipped ratios as weights, so that no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, Tensor, TokenLosses


class CISPO(GroupPolicy):
    """MiniMax 2025, arXiv:2506.13585. Per token, `-w sg[clip(r, 1 - clip_low, 1 + clip_high)] A trainer_logprob`.

    sg: without gradient. Published with no lower bound, `clip_low=1`. `clipped_T` marks tokens whose ratio was cut.
    """

    name: Literal["cispo"] = Field(description="Algorithm.")
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description="Ratios weigh at least 1 - clip_low; 1 = no lower bound."
    )
    clip_high: Positive = Field(description="Ratios weigh at most 1 + clip_high.")

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        mask_T = rows.loss_mask_T
        ratio_T = toolbox.bounded(toolbox.log_ratio(rows).detach()).exp()
        weight_T = ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        logprobs_T = rows.trainer_logprobs_T.masked_fill(~mask_T, 0.0)
        loss_T = -weights_T * weight_T * rows.advantages_T.masked_fill(~mask_T, 0.0) * logprobs_T
        return toolbox.TokenLosses(loss_T, (weight_T != ratio_T) & mask_T)

    def objective(self) -> str:
        return f"-w clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A log-prob"
