"""The seam between the trainer and the algorithms: what an algorithm gets, and what it gives back.

The trainer calls `PolicyObjective.compute_loss` once per microbatch and knows nothing else of an algorithm; the
controller calls `Algorithm.compute_advantages` once per batch. Shape legend: T = rows of a packed microbatch that this
rank holds, B = rollouts of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from moerl.algorithms.sequences import Sequences
from moerl.contract.batch import BatchTotals

KLSupport = Literal["kept", "full"]
"""Ids that an exact KL sums over: the kept set of each token, both models renormalised inside it (the full vocabulary
where nothing was cut), or always the full vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRows:
    """One microbatch as a policy loss sees it; every log-prob is under the support its token was drawn from, in nats.

    trainer_logprobs_T: float32; of the weights being trained; carries the gradient.
    proximal_logprobs_T: float32; of the trainer's weights when the batch arrived (equal to the trainer's
        own on the first update of a batch). No gradient.
    rollout_logprobs_T: float32; as the engine reported them. No gradient.
    advantages_T: float32. loss_mask_T: bool; True on tokens to train on.
    entropy_T: float32; of the distribution that `trainer_logprobs_T` are of, with gradient.
    kl_T: float32; exact KL to the reference per token, with gradient. None unless `PolicyObjective.reference_kl`.
    sequences: which rows belong together. totals: of the whole batch; what a denominator is made of, and what the
        algorithm said of it (`Algorithm.batch_facts`).
    draws_T: float32; evenly drawn from [0, 1) for each token of each rollout, the same in every layout.
    """

    trainer_logprobs_T: Tensor
    proximal_logprobs_T: Tensor
    rollout_logprobs_T: Tensor
    advantages_T: Tensor
    loss_mask_T: Tensor
    entropy_T: Tensor
    sequences: Sequences
    totals: BatchTotals
    draws_T: Tensor
    kl_T: Tensor | None = None

    def sequence_sum(self, values_T: Tensor) -> Tensor:
        """For each row the sum of the values over the trained tokens of its sequence; rules as for `Sequences.sum`.

        What stands on untrained rows does not count, whatever it is.
        """
        return self.sequences.sum(values_T.masked_fill(~self.loss_mask_T, 0.0))

    def sequence_lengths(self) -> Tensor:
        """float32 [T]: for each row the trained tokens of its sequence, at least 1, so that one can divide by it."""
        return self.sequences.sum(self.loss_mask_T.float()).clamp(min=1.0)


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Result of an algorithm on a microbatch.

    loss: scalar, differentiable; this rank's part of the loss of the batch. Parts are added over microbatches, context-
        and data-parallel ranks, so a mean divides by numbers of the whole batch: `token_mean` and `PolicyRows.totals`.
    losses_T: float32; loss of each token before any denominator. clipped_T: bool; True if the gradient of the token was
    cut. weights_T: float32; correction of each token, 0 on tokens that are left out. These three are for reports; None
    if the algorithm has none.
    """

    loss: Tensor
    losses_T: Tensor | None = None
    clipped_T: Tensor | None = None
    weights_T: Tensor | None = None


class PolicyObjective(Protocol):
    """The part of an algorithm that the trainer calls."""

    @property
    def reference_kl(self) -> KLSupport | None:
        """Ids that `PolicyRows.kl_T` sums over; None if no KL is wanted, and so no reference model is built."""
        ...

    def compute_loss(self, rows: PolicyRows) -> PolicyLoss:
        """The loss of one microbatch. The same calls of `sequence_sum` on all ranks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The trained tokens of what one optimizer step works on, N of them: both float32 [N], in no particular order."""

    advantages_N: Tensor
    rollout_logprobs_N: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RewardedBatch:
    """Input of the computation of advantages; one entry per rollout.

    rewards_B: float32. group_index_B: int64; rollouts of one prompt have the same. episode_index_B: int64; rollouts
    that are parts of one episode have the same. num_tokens_B: int64; sampled tokens. truncated_B: bool; True if the
    response was cut off at its longest length.
    kl_B: float32, exact KL to the reference of the weights that the batch met, summed over the tokens of each rollout;
    None unless `Algorithm.kl_in_reward`.
    """

    rewards_B: Tensor
    group_index_B: Tensor
    episode_index_B: Tensor
    num_tokens_B: Tensor
    truncated_B: Tensor
    kl_B: Tensor | None = None


class Algorithm(PolicyObjective, Protocol):
    """Turns rewards into advantages, and log-probs into a loss."""

    @property
    def kl_in_reward(self) -> bool:
        """True if advantages are computed from `RewardedBatch.kl_B`."""
        ...

    def compute_advantages(self, batch: RewardedBatch) -> Tensor:
        """float32 [B]: one advantage per rollout, of all its sampled tokens."""
        ...

    def batch_facts(self, tokens: SampledTokens) -> dict[str, float]:
        """Finite numbers by name about all tokens of an optimizer step, which `compute_loss` gets in `totals.facts`."""
        ...
