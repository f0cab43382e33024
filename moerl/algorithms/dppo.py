"""Divergence proximal policy optimisation: a bound on how far a token's probability moves, in place of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, Tensor, TokenLosses


class DPPO(GroupPolicy):
    """Qi et al. 2026, arXiv:2602.04879. Per token, `-w r A`, and 0 if the token has moved too far from the sampler in
    the direction of A.

    Too far: with p of the weights being trained and q of the sampler, both inside the support that the token was drawn
    from, D(q, p) is above `divergence_high` while A > 0 and p > q, or above `divergence_low` while A < 0 and p < q.
    D is that of the token against all others: `|p - q|` (tv) or `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` (kl).
    Published with 0.2 for tv and 0.05 for kl, and with w r, the ratio to the sampler, cut at 20.
    """

    name: Literal["dppo"] = Field(description="Algorithm.")
    divergence: Literal["tv", "kl"] = Field(
        description="Distance between sampler and trainer of a token against all others: total variation, or KL."
    )
    divergence_low: Positive = Field(description="Largest distance of a token with A < 0 that has become less likely.")
    divergence_high: Positive = Field(description="Largest distance of a token with A > 0 that has become likelier.")

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        mask_T = rows.loss_mask_T
        advantages_T = rows.advantages_T.detach().masked_fill(~mask_T, 0.0)
        moved_T, distance_T = toolbox.binary_divergence(rows, self.divergence)
        far_up_T = (advantages_T > 0.0) & (moved_T > 0.0) & (distance_T > self.divergence_high)
        far_down_T = (advantages_T < 0.0) & (moved_T < 0.0) & (distance_T > self.divergence_low)
        far_T = far_up_T | far_down_T
        loss_T = -weights_T * toolbox.bounded(toolbox.log_ratio(rows)).exp() * advantages_T
        return toolbox.TokenLosses(loss_T.masked_fill(far_T, 0.0), far_T)

    def objective(self) -> str:
        low, high = self.divergence_low, self.divergence_high
        return f"-w r A, 0 where {self.divergence}(sampler, trainer) > {high:g} upwards or {low:g} downwards with A"
