"""Loss functions over the last hidden states of one packed microbatch, for `MegatronTrainer`. Runs in every trainer
rank.

Shape legend: T = packed rows, t = T / tensor of them, H = hidden width, N = listed kept ids.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.algorithms.losses import token_mean
from moerl.algorithms.policy import KLSupport, PolicyRows, Sequences
from moerl.algorithms.section import Algorithm
from moerl.contract.batch import BatchTotals, Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.contract.routing import POSITION_PRIME, mix
from moerl.kernels import products
from moerl.kernels.full_kl import kl_full
from moerl.kernels.head import Head, HeadInputs
from moerl.kernels.kept import kl_kept
from moerl.kernels.plan import HostPlan, Rows, ScorePlan, plan_full, plan_rows
from moerl.kernels.scores import KeptScores, listed_logprobs, score_full, score_kept
from moerl.trainer import groups, transfers
from moerl.trainer.trainer import MegatronTrainer, RowScores


@dataclass(frozen=True, slots=True)
class TextLoss:
    """Next-token cross-entropy, averaged over the rows to be learned."""

    batches: Sequence[Microbatch]
    """This rank's shares of the microbatches."""
    vocab_size: int
    """Size of the Hugging Face model's vocabulary; ids that are never sampled are made unlikely, too."""
    denominator: float
    """Rows to be learned in the whole batch, over all microbatches and ranks."""

    def __call__(self, hidden_tH: Tensor, head: Head, microbatch: int) -> tuple[Tensor, RowScores]:
        batch = self.batches[microbatch]
        mask_T = transfers.to_device(batch.loss_mask)
        inputs = head.over(self.vocab_size).enter(hidden_tH)
        rows_T = Rows.open(batch.target_ids, np.ones(batch.num_rows, np.float32), batch.loss_mask)
        scores = score_full(inputs, plan_rows(rows_T, inputs))
        losses_T = -scores.logprobs_T
        rows = RowScores(scores.logprobs_T.detach(), scores.entropy_T.detach(), losses_T=losses_T.detach())
        return token_mean(losses_T, mask_T, self.denominator), rows


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen model of the same layout, for the KL."""

    model: MegatronTrainer
    """Trainer of the frozen model."""
    hidden: Sequence[Tensor]
    """Its `last_hidden` for the microbatches of the loss."""
    support: KLSupport
    """Ids that the KL sums over."""


@functools.cache
def _planner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="plans")


@dataclass(frozen=True, slots=True)
class Scorer:
    """Loss function that scores each sampled token under the distribution it was drawn from."""

    batches: Sequence[Microbatch]
    """This rank's shares of the microbatches."""
    keep_mask: bool
    """True to score inside the recorded kept sets; False scores over the full vocabulary (the biased ablation)."""
    with_full: bool = False
    """True to score over the full vocabulary as well, for mismatch tables."""
    reference: Reference | None = None
    """Frozen model of the KL; None if no KL is wanted."""
    _ahead: dict[int, Future[HostPlan]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Plans begun and not yet used, by microbatch."""

    def rows(self, microbatch: int) -> Rows:
        """Returns the rows of a microbatch that are scored."""
        batch = self.batches[microbatch]
        rows_T = Rows.open(batch.target_ids, batch.temperatures, batch.loss_mask)
        if self.keep_mask:
            rows_T = replace(rows_T, kept=batch.kept, truncated_T=batch.truncated)
        return replace(rows_T, full_T=batch.loss_mask) if self.with_full else rows_T

    def _plan(self, inputs: HeadInputs, microbatch: int) -> ScorePlan:
        """Returns the plan of a microbatch. For a GPU, a thread makes the plans of later microbatches during the
        passes."""
        if not products.on_device(inputs.weight_VpH.device):
            return plan_rows(self.rows(microbatch), inputs)
        if microbatch not in self._ahead:
            head = Head(inputs.weight_VpH.detach(), inputs.shard)
            for index in range(microbatch, len(self.batches)):
                self._ahead[index] = _planner().submit(HostPlan.of, self.rows(index), head)
        return self._ahead.pop(microbatch).result().send()

    def score(self, inputs: HeadInputs, microbatch: int) -> tuple[KeptScores, Tensor | None, ScorePlan]:
        """Returns scores, the exact KL to the reference over the support of each token ([T]; None without a
        reference), and the plan of both."""
        rows_T, plan = self.rows(microbatch), self._plan(inputs, microbatch)
        scores = score_kept(inputs, plan)
        if self.reference is None:
            return scores, None, plan
        with torch.no_grad():
            theirs = self.reference.model.head.enter(self.reference.hidden[microbatch])
        mask_T = self.batches[microbatch].loss_mask
        if self.reference.support == "full":
            return scores, kl_full(inputs, theirs, plan_full(rows_T, mask_T, inputs)), plan
        on_kept_T = kl_kept(scores.kept_logprobs_N, listed_logprobs(theirs, plan), plan.kept)
        open_rows = plan_full(rows_T, mask_T & ~rows_T.truncated_T, inputs)
        return scores, on_kept_T + kl_full(inputs, theirs, open_rows), plan

    def __call__(self, hidden_tH: Tensor, head: Head, microbatch: int) -> tuple[Tensor, RowScores]:
        scores, kl_T, plan = self.score(head.enter(hidden_tH), microbatch)
        rows = RowScores(
            logprobs_T=scores.logprobs_T.detach(),
            entropy_T=scores.entropy_T.detach(),
            full_logprobs_T=None if scores.full is None else scores.full.logprobs_T.detach(),
            kl_T=None if kl_T is None else kl_T.detach(),
            kept=plan.kept if self.keep_mask else None,
        )
        return scores.logprobs_T.sum(), rows


@dataclass(frozen=True, slots=True)
class Drift:
    """Distance of the weights from those that sampled the tokens, in updates."""

    version: int
    """Weight version that the batch met."""
    updates_per_version: int
    """Updates per batch."""
    since: int
    """Updates on this batch so far."""

    def proximal(self, trainer_T: Tensor, rollout_T: Tensor, versions_T: Tensor) -> Tensor:
        """Returns `rollout + a (trainer - rollout)`, [T], with a = u / (u + since), u the updates between a token's
        version and the batch; for a token of the batch's version, that is the sampler's log-prob.

        Estimates the log-probs of the weights that the batch met, as if they had moved evenly (AReaL's loglinear).
        """
        before_T = (self.version - versions_T) * self.updates_per_version
        share_T = (before_T / (before_T + self.since)).to(trainer_T.dtype)
        return rollout_T + share_T * (trainer_T - rollout_T)


@dataclass(frozen=True, slots=True)
class PolicyGradientLoss:
    """An algorithm's loss on sampled tokens. With neither `proximal_logprobs` nor `drift`, the proximal log-probs are
    the current ones, without gradient."""

    scorer: Scorer
    """Scores the tokens; has the batches."""
    objective: Algorithm
    """The algorithm."""
    totals: BatchTotals
    """Totals of the whole batch."""
    layout: RankCoordinates
    """This rank's coordinates."""
    proximal_logprobs: Sequence[Tensor] | None = None
    """Per microbatch float32 [T] on the CPU, the trainer's log-probs before the first update on this batch. None if
    there was no pass before."""
    drift: Drift | None = None
    """Interpolates the proximal log-probs without a pass; None on the first update of a batch, and if they are not
    interpolated."""

    def __call__(self, hidden_tH: Tensor, head: Head, microbatch: int) -> tuple[Tensor, RowScores]:
        batch = self.scorer.batches[microbatch]
        scores, kl_T, plan = self.scorer.score(head.enter(hidden_tH), microbatch)
        rollout_T = transfers.to_device(batch.rollout_logprobs)
        proximal_T = scores.logprobs_T.detach()
        if self.proximal_logprobs is not None:
            proximal_T = transfers.to_device(self.proximal_logprobs[microbatch].numpy())
        elif self.drift is not None:
            proximal_T = self.drift.proximal(proximal_T, rollout_T, transfers.to_device(batch.versions))
        rows = PolicyRows(
            trainer_logprobs_T=scores.logprobs_T,
            proximal_logprobs_T=proximal_T,
            rollout_logprobs_T=rollout_T,
            advantages_T=transfers.to_device(batch.advantages),
            loss_mask_T=transfers.to_device(batch.loss_mask),
            entropy_T=scores.entropy_T,
            sequences=sequences_of(batch, self.layout),
            totals=self.totals,
            draws_T=transfers.to_device(draws(batch, self.layout)),
            scores_T={name: transfers.to_device(values) for name, values in batch.scores.items()},
            kl_T=kl_T,
        )
        policy = self.objective.compute_loss(rows)
        scored = RowScores(
            logprobs_T=scores.logprobs_T.detach(),
            entropy_T=scores.entropy_T.detach(),
            clipped_T=None if policy.clipped_T is None else policy.clipped_T.detach(),
            losses_T=None if policy.losses_T is None else policy.losses_T.detach(),
            weights_T=None if policy.weights_T is None else policy.weights_T.detach(),
            kl_T=None if rows.kl_T is None else rows.kl_T.detach(),
            kept=plan.kept if self.scorer.keep_mask else None,
        )
        return policy.loss, scored


def draws(batch: Microbatch, layout: RankCoordinates) -> np.ndarray:
    """Returns float32 [T], evenly from [0, 1), which depend on each row's rollout and position alone."""
    num_rows_N = np.diff(batch.cu_seqlens) // layout.dims.context
    positions_T = (batch.position_ids + 1).astype(np.uint64)
    words_T = mix(np.repeat(batch.rollout_keys, num_rows_N) + positions_T * np.uint64(POSITION_PRIME))
    return (words_T >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def sequences_of(batch: Microbatch, layout: RankCoordinates) -> Sequences:
    """Returns the sequences of this rank's share of a microbatch.

    Context-parallel ranks have equal parts of every sequence and add their sums; tensor-parallel ranks have the same
    rows.
    """
    num_rows_N = transfers.to_device(np.diff(batch.cu_seqlens).astype(np.int64) // layout.dims.context)
    if layout.dims.context == 1:
        return Sequences(num_rows_N)
    group = groups.context_group()
    return Sequences(num_rows_N, lambda totals_N: cast(None, dist.all_reduce(totals_N, group=group)))
