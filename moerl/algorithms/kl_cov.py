"""KL-Cov: tokens that move the entropy most are held back by a penalty on how far they move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, SampledTokens, Tensor, TokenLosses

_THRESHOLD = "kl_cov_threshold"


class KLCov(GroupPolicy):
    """Cui et al. 2025, arXiv:2505.22617. Per token `-w r A`, without a clip, and `w cov_coef |log r|` on top for
    `cov_share` of the tokens of a batch: those with the highest cov, one at least.

    cov: `moerl.algorithms.covariance`. Published with 0.0002 and 1. Nothing counts as clipped.
    """

    name: Literal["kl_cov"] = Field(description="Algorithm.")
    cov_share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        description="Share of the tokens of a batch that is held back for its covariance."
    )
    cov_coef: Positive = Field(description="Weight of |log r| of these tokens.")

    def batch_facts(self, tokens: SampledTokens) -> dict[str, float]:
        from moerl.algorithms import toolbox

        means = toolbox.mean_facts(tokens)
        # In the precision of the trainer, which makes the comparison.
        found_N = toolbox.covariances(tokens.advantages_N, tokens.rollout_logprobs_N, means)
        count = max(1, int(self.cov_share * len(found_N)))
        return means | {_THRESHOLD: float(found_N.topk(count).values[-1])}

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        mask_T = rows.loss_mask_T
        log_ratio_T = toolbox.log_ratio(rows)
        objective_T = toolbox.bounded(log_ratio_T).exp() * rows.advantages_T.masked_fill(~mask_T, 0.0)
        held_T = toolbox.row_covariances(rows) >= rows.totals.facts[_THRESHOLD]
        loss_T = weights_T * (self.cov_coef * log_ratio_T.abs() * held_T - objective_T)
        return toolbox.TokenLosses(loss_T.masked_fill(~mask_T, 0.0), mask_T & False)

    def objective(self) -> str:
        return f"-w r A + w {self.cov_coef:g} |log r| for {self.cov_share:g} of the tokens, with the highest cov"
