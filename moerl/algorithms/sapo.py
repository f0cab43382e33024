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

        return toolbox.gated_policy_loss(rows, weights_T, self.tau_positive, self.tau_negative)

    def objective(self) -> str:
        return f"-w 4 / tau sigmoid(tau (r - 1)) A, tau {self.tau_positive:g} if A > 0, else {self.tau_negative:g}"
