"""Group sequence policy optimisation: one ratio and one clip for a whole response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, Tensor, TokenLosses


class GSPO(GroupPolicy):
    """Zheng et al. 2025, arXiv:2507.18071. With `s = exp(mean over the response of trainer - proximal)`, for each of
    its tokens `-w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`.

    The gradient of s goes through all tokens of the response; the form with a stop-gradient and token ratios that is
    common elsewhere has the same gradient. Published with `reduction=sequence_mean`.
    """

    name: Literal["gspo"] = Field(description="Algorithm.")
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description="Ratios of responses below 1 - clip_low are clipped; about a hundredth of a token's."
    )
    clip_high: Positive = Field(description="Ratios of responses above 1 + clip_high are clipped.")

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        mean_T = rows.sequence_sum(toolbox.log_ratio(rows)) / rows.sequence_lengths()
        return toolbox.clipped_policy_loss(rows, weights_T, mean_T, self.clip_low, self.clip_high)

    def objective(self) -> str:
        return f"-w min(s A, clip(s, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A), s of a response"
