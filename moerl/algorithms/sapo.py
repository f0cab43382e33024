"""Soft adaptive policy optimisation: a smooth gate on the ratio in place of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, Tensor, TokenLosses


class SAPO(GroupPolicy):
    """Gao et al. 2025, arXiv:2511.20347. Per token, `-w 4 / tau sigmoid(tau (r - 1)) A`, tau by the sign of A.

    The gradient with respect to r is A at r = 1 and falls off on both sides. Published with 1.0 and 1.05. Nothing
    counts as clipped.
    """

    name: Literal["sapo"] = Field(description="Algorithm.")
    tau_positive: Positive = Field(description="Sharpness of the gate on tokens with a positive advantage.")
    tau_negative: Positive = Field(description="Sharpness of the gate on tokens with a negative one.")

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        mask_T = rows.loss_mask_T
        advantages_T = rows.advantages_T.detach().masked_fill(~mask_T, 0.0)
        is_positive_T = advantages_T > 0.0
        tau_T = advantages_T.new_full(mask_T.shape, self.tau_negative).masked_fill(is_positive_T, self.tau_positive)
        gate_T = (tau_T * (toolbox.bounded(toolbox.log_ratio(rows)).exp() - 1.0)).sigmoid() * 4.0 / tau_T
        loss_T = -weights_T * gate_T * advantages_T
        return toolbox.TokenLosses(loss_T.masked_fill(~mask_T, 0.0), mask_T & False)

    def objective(self) -> str:
        return f"-w 4 / tau sigmoid(tau (r - 1)) A, tau {self.tau_positive:g} if A > 0, else {self.tau_negative:g}"
