"""Geometric-mean policy optimisation: the geometric mean of clipped token ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, Tensor, TokenLosses


class GMPO(GroupPolicy):
    """Zhao et al. 2025, arXiv:2507.20673. With l the log-ratio of each token, at most `clip_high` if A > 0 and at least
    `-clip_low` if A < 0, for each token of a response `-w exp(mean over the response of l) A`.

    Published with `reduction=sequence_mean`, 0.4 and 0.4.
    """

    name: Literal["gmpo"] = Field(description="Algorithm.")
    clip_low: Positive = Field(description="Log-ratios below -clip_low are clipped, in nats.")
    clip_high: Positive = Field(description="Log-ratios above clip_high are clipped, in nats.")

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        mask_T = rows.loss_mask_T
        advantages_T = rows.advantages_T.detach().masked_fill(~mask_T, 0.0)
        log_ratio_T = toolbox.log_ratio(rows)
        above_T = (advantages_T > 0.0) & (log_ratio_T > self.clip_high)
        below_T = (advantages_T < 0.0) & (log_ratio_T < -self.clip_low)
        cut_T = log_ratio_T.masked_fill(above_T, self.clip_high).masked_fill(below_T, -self.clip_low)
        mean_T = rows.sequence_sum(cut_T) / rows.sequence_lengths()
        loss_T = -weights_T * toolbox.bounded(mean_T).exp() * advantages_T
        return toolbox.TokenLosses(loss_T.masked_fill(~mask_T, 0.0), above_T | below_T)

    def objective(self) -> str:
        return f"-w exp(mean over the response of clip(log r, -{self.clip_low:g}, {self.clip_high:g})) A"
