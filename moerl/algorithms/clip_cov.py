"""Clip-Cov: tokens that move the entropy most give no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.algorithms.group_policy import GroupPolicy
from moerl.sections import Positive

if TYPE_CHECKING:
    from moerl.algorithms.toolbox import PolicyRows, SampledTokens, Tensor, TokenLosses

_PROBABILITY = "clip_cov_probability"


class ClipCov(GroupPolicy):
    """Cui et al. 2025, arXiv:2505.22617. PPO's clipped surrogate, and 0 for `cov_share` of the tokens of a batch, drawn
    among those with `cov_low < cov < cov_high`.

    cov: `moerl.algorithms.covariance`. Each of these tokens that is not clipped is left out by a draw of its own, which
    is the same in every layout, with the probability that gives the share on average if none is clipped; all are, if
    there are fewer than that. Published
    with 0.0002, 1 and 5.
    """

    name: Literal["clip_cov"] = Field(description="Algorithm.")
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Ratios below 1 - clip_low are clipped.")
    clip_high: Positive = Field(description="Ratios above 1 + clip_high are clipped.")
    cov_share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        description="Share of the tokens of a batch that is left out for its covariance."
    )
    cov_low: float = Field(description="Tokens with a covariance above it may be left out.")
    cov_high: float = Field(description="Tokens with a covariance below it may be left out.")

    def batch_facts(self, tokens: SampledTokens) -> dict[str, float]:
        from moerl.algorithms import toolbox

        means = toolbox.mean_facts(tokens)
        found_N = toolbox.covariances(tokens.advantages_N.double(), tokens.rollout_logprobs_N.double(), means)
        eligible = int(((found_N > self.cov_low) & (found_N < self.cov_high)).sum())
        wanted = max(1, int(self.cov_share * len(found_N)))
        return means | {_PROBABILITY: min(1.0, wanted / max(1, eligible))}

    def token_losses(self, rows: PolicyRows, weights_T: Tensor) -> TokenLosses:
        from moerl.algorithms import toolbox

        log_ratio_T = toolbox.log_ratio(rows)
        found = toolbox.clipped_policy_loss(rows, weights_T, log_ratio_T, self.clip_low, self.clip_high)
        cov_T = toolbox.row_covariances(rows)
        eligible_T = (cov_T > self.cov_low) & (cov_T < self.cov_high) & ~found.clipped_T
        left_out_T = eligible_T & (rows.draws_T < rows.totals.facts[_PROBABILITY])
        return toolbox.TokenLosses(found.loss_T.masked_fill(left_out_T, 0.0), found.clipped_T | left_out_T)

    def objective(self) -> str:
        clip = f"-w min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A)"
        return f"{clip}, 0 for {self.cov_share:g} of the tokens, with cov in ({self.cov_low:g}, {self.cov_high:g})"
