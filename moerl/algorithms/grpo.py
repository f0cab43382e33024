"""Group-relative policy optimisation: PPO's clipped surrogate on advantages within groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, Tensor, TokenLosses


class GRPO(GroupPolicy):
    """Shao et al. 2024, arXiv:2402.03300. Per token, `-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    Asymmetric bounds: DAPO (arXiv:2503.14476). With `dual_clip` a token with A < 0 adds at most `-dual_clip A` (Ye et
    al. 2020, arXiv:1912.09729). Without `normalize_std`: Dr. GRPO (arXiv:2503.20783).
    """

    name: Literal["grpo"] = Field(description="Algorithm.")
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Ratios below 1 - clip_low are clipped.")
    clip_high: Positive = Field(description="Ratios above 1 + clip_high are clipped.")
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        description="Ratio at which tokens with a negative advantage stop, above 1; null = they do not."
    )

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        log_ratio_T = toolbox.log_ratio(rows)
        return toolbox.clipped_policy_loss(rows, weights_T, log_ratio_T, self.clip_low, self.clip_high, self.dual_clip)

    def objective(self) -> str:
        dual = "" if self.dual_clip is None else f", at most -{self.dual_clip:g} A if A < 0"
        return f"-w min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A){dual}"
