"""The interface between the trainer and the algorithms: what an algorithm gets, and what it gives back.

Ranks call `Algorithm.compute_loss` once per microbatch, and else read an algorithm's properties alone; the
controller calls `Algorithm.compute_advantages` once per batch. Shape legend: T = rows of a packed microbatch that this
rank holds, B = rollouts of a batch, N = sampled tokens of a batch, in `Sequences` the sequences of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from moerl.contract.batch import BatchTotals

KLSupport = Literal["kept", "full"]
"""Ids that an exact KL sums over: the kept set of each token, both models renormalised inside it (the full vocabulary
if nothing was cut), or always the full vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The N sequences of a microbatch, in the order of their rows, as far as these lie on this rank."""

    num_rows_N: Tensor
    """int64; rows of each sequence on this rank, which stand side by side. A sequence of pad rows counts, too."""
    add_parts: Callable[[Tensor], None] | None = None
    """Function that adds float64 [N] in place over the ranks that hold the other rows of the same sequences, a
    collective of these ranks; None if every sequence lies on this rank completely."""

    def sum(self, values_T: Tensor) -> Tensor:
        """Returns for each row the sum of the values over all rows of its sequence, on all ranks: [T], dtype as given.

        Added in float64, so neither packing nor layout changes the result by more than its last digit. The gradient
        goes back to all rows of the sequence, on all ranks. A loss of which every rank adds its own rows is therefore
        counted once. A collective if sequences are cut over ranks: all of these ranks must call it equally often, in
        the same order, whatever the values are.
        """
        return _Sum.apply(values_T, self)  # type: ignore[return-value]

    def spread(self, values_T: Tensor) -> Tensor:
        """Returns `sum` without a gradient. It is its own transpose: the gradient of `sum` is `spread` of the
        gradient."""
        totals_N = torch.segment_reduce(values_T.double(), "sum", lengths=self.num_rows_N, initial=0.0, unsafe=True)
        if self.add_parts is not None:
            self.add_parts(totals_N)
        # With `output_size` and `unsafe` torch reads no numbers from the device, so the host does not wait for it.
        return totals_N.repeat_interleave(self.num_rows_N, output_size=len(values_T)).to(values_T.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_T: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return sequences.spread(values_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.sequences.spread(grads[0]), None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRows:
    """One microbatch, input of a policy loss; every log-prob is under the support its token was drawn from, in nats."""

    trainer_logprobs_T: Tensor
    """float32, of the weights being trained; carries the gradient."""
    proximal_logprobs_T: Tensor
    """float32, of the trainer's weights when the batch arrived, computed or interpolated (equal to the trainer's own on
    the first update of a batch). No gradient."""
    rollout_logprobs_T: Tensor
    """float32, as the engine reported them. No gradient."""
    advantages_T: Tensor
    """float32; advantage of the row's token, or of its whole rollout, on trained rows, 0 on others."""
    loss_mask_T: Tensor
    """bool; True on tokens to train on."""
    entropy_T: Tensor
    """float32, nats; of the distribution that `trainer_logprobs_T` are of, with gradient."""
    sequences: Sequences
    """Rows that belong to one response."""
    totals: BatchTotals
    """Counts of the whole batch, for denominators, and the algorithm's own `Algorithm.batch_facts`."""
    draws_T: Tensor
    """float32; evenly drawn from [0, 1) for each token of each rollout, the same in every layout."""
    scores_T: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By name float32; side scores of tokens, as their trajectories have them. The names of `Algorithm.needs`."""
    kl_T: Tensor | None = None
    """float32, nats; exact KL to the reference per token, with gradient. None without `Algorithm.reference_kl`,
    and with `Algorithm.kl_in_reward`."""

    def sequence_sum(self, values_T: Tensor) -> Tensor:
        """Returns for each row the sum of the values over the trained tokens of its sequence; rules as for
        `Sequences.sum`.

        Values on untrained rows do not count, NaN included.
        """
        return self.sequences.sum(values_T.masked_fill(~self.loss_mask_T, 0.0))

    def sequence_lengths(self) -> Tensor:
        """Returns for each row the number of trained tokens of its sequence, at least 1, for divisions: float32 [T]."""
        return self.sequences.sum(self.loss_mask_T.float()).clamp(min=1.0)


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Result of an algorithm on a microbatch. All but `loss` is for reports, and None if the algorithm has none."""

    loss: Tensor
    """Scalar, differentiable; this rank's part of the loss of the batch. Parts are added over microbatches, context-
    and data-parallel ranks, so a mean divides by numbers of the whole batch: `token_mean` and `PolicyRows.totals`."""
    losses_T: Tensor | None = None
    """float32; loss of each token before any denominator."""
    clipped_T: Tensor | None = None
    """bool; True if the token's gradient was cut, or its weight (CISPO)."""
    weights_T: Tensor | None = None
    """float32; correction of each token, 0 on tokens that are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The trained tokens of the batch or minibatch of one optimizer step, N of them, in no particular order."""

    advantages_N: Tensor
    """float32."""
    rollout_logprobs_N: Tensor
    """float32, nats; as the engine reported them."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardedBatch:
    """Input of the computation of advantages; one entry per rollout."""

    rewards_B: Tensor
    """float32."""
    group_index_B: Tensor
    """int64; the same for rollouts of one prompt."""
    episode_index_B: Tensor
    """int64; the same for rollouts that are parts of one episode."""
    num_tokens_B: Tensor
    """int64; sampled tokens."""
    truncated_B: Tensor
    """bool; True if the response was cut off at its longest length."""
    agent_index_B: Tensor
    """int64; the same for rollouts of one agent (`Lineage.agent_id`)."""
    turn_index_N: Tensor
    """int64; number of the turn of each of the N sampled tokens, rollout by rollout, from 0; those of a fork go on from
    the turns that it begins with."""
    turn_rewards_N: Tensor
    """float32; part of the reward that a turn earned (`Session.credit`), on its last token, 0 on others."""
    kl_B: Tensor | None = None
    """float32, nats; exact KL to the reference of the weights that the batch met, summed over the tokens of each
    rollout. None unless `Algorithm.kl_in_reward`."""
    scores_N: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By name float32 [N]; side scores of the sampled tokens. The names of `Algorithm.needs`."""
