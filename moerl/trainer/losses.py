"""Loss functions over the logits of one packed microbatch, for `MegatronTrainer`. Runs in every trainer rank.

Shape legend: T = packed rows, V = this rank's vocabulary columns, N = listed kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.losses import PolicyLossInputs
from moerl.algorithms.reduction import token_mean
from moerl.algorithms.registry import Algorithm
from moerl.contract.batch import Microbatch
from moerl.contract.trajectory import KeptSets
from moerl.kernels.full import kl_full, score_full
from moerl.kernels.kept import KeptRows, kl_kept
from moerl.kernels.support import SupportScores, score_support
from moerl.kernels.vocab_parallel import VocabShard
from moerl.trainer.trainer import MegatronTrainer, RowScores


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array.copy()).to(like.device)


@dataclass(frozen=True, slots=True)
class TextLoss:
    """Next-token cross-entropy, averaged over the rows to be learned.

    denominator: rows to be learned in the whole batch, over all microbatches and ranks.
    """

    batches: Sequence[Microbatch]
    shard: VocabShard
    denominator: float

    def __call__(self, logits_TV: Tensor, microbatch: int) -> tuple[Tensor, RowScores]:
        batch = self.batches[microbatch]
        ones_T = torch.ones(batch.num_rows, device=logits_TV.device)
        scores = score_full(logits_TV, _tensor(batch.target_ids, logits_TV), ones_T, self.shard)
        mask_T = _tensor(batch.loss_mask, logits_TV)
        losses_T = -scores.logprobs_T.where(mask_T, 0.0)
        rows = RowScores(
            logprobs_T=scores.logprobs_T.detach().cpu(),
            entropy_T=scores.entropy_T.cpu(),
            losses_T=losses_T.detach().cpu(),
        )
        return token_mean(losses_T, mask_T, self.denominator), rows


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores each sampled token under the distribution it was drawn from.

    keep_mask: score inside the recorded kept sets; False scores over the whole vocabulary (the biased ablation).
    with_full: also score over the whole vocabulary, for mismatch tables.
    """

    batches: Sequence[Microbatch]
    shard: VocabShard
    keep_mask: bool
    with_full: bool = False

    def kept(self, logits_TV: Tensor, microbatch: int) -> KeptRows:
        batch = self.batches[microbatch]
        if self.keep_mask:
            return KeptRows.from_csr(batch.kept, batch.truncated, logits_TV.device)
        nothing = np.zeros(batch.num_rows, bool)
        return KeptRows.from_csr(KeptSets.empty(batch.num_rows), nothing, logits_TV.device)

    def support(self, logits_TV: Tensor, microbatch: int) -> SupportScores:
        batch = self.batches[microbatch]
        return score_support(
            logits_TV,
            _tensor(batch.target_ids, logits_TV),
            self.kept(logits_TV, microbatch),
            _tensor(batch.temperatures, logits_TV),
            self.shard,
            select_T=_tensor(batch.loss_mask, logits_TV),
        )

    def __call__(self, logits_TV: Tensor, microbatch: int) -> tuple[Tensor, RowScores]:
        batch = self.batches[microbatch]
        scores = self.support(logits_TV, microbatch)
        full_T = None
        if self.with_full:
            rows_R = _tensor(batch.loss_mask, logits_TV).nonzero().flatten()
            full = score_full(
                logits_TV.detach(),
                _tensor(batch.target_ids, logits_TV),
                _tensor(batch.temperatures, logits_TV),
                self.shard,
                rows_R=rows_R,
            )
            full_T = torch.zeros(batch.num_rows).index_copy_(0, rows_R.cpu(), full.logprobs_T.cpu())
        rows = RowScores(
            logprobs_T=scores.logprobs_T.detach().cpu(),
            entropy_T=scores.entropy_T.cpu(),
            full_logprobs_T=full_T,
        )
        return scores.logprobs_T.sum(), rows


@dataclass(frozen=True, slots=True)
class PolicyGradientLoss:
    """The algorithm's loss on sampled tokens, with the exact KL to a reference model where one is given.

    denominator: trained tokens of the whole batch, over all microbatches and ranks.
    proximal_logprobs: per microbatch float32 [T], the trainer's log-probs before the first update on this batch;
        None where this update is the first one (they are then the current log-probs, without gradient).
    reference: a frozen model of the same layout; reference_inputs: its `head_inputs` for `scorer.batches`.
    """

    scorer: Scorer
    algorithm: Algorithm
    denominator: float
    proximal_logprobs: Sequence[Tensor] | None = None
    reference: MegatronTrainer | None = None
    reference_inputs: Sequence[Tensor] = ()

    def __call__(self, logits_TV: Tensor, microbatch: int) -> tuple[Tensor, RowScores]:
        batch = self.scorer.batches[microbatch]
        scores = self.scorer.support(logits_TV, microbatch)
        mask_T = _tensor(batch.loss_mask, logits_TV)
        if self.proximal_logprobs is None:
            proximal_T = scores.logprobs_T.detach()
        else:
            proximal_T = self.proximal_logprobs[microbatch].to(logits_TV.device)
        inputs = PolicyLossInputs(
            trainer_logprobs_T=scores.logprobs_T,
            proximal_logprobs_T=proximal_T,
            rollout_logprobs_T=_tensor(batch.rollout_logprobs, logits_TV),
            advantages_T=_tensor(batch.advantages, logits_TV),
            loss_mask_T=mask_T,
            kl_T=None if self.reference is None else self._kl(self.reference, logits_TV, scores, microbatch),
        )
        loss = self.algorithm.token_losses(inputs)
        rows = RowScores(
            logprobs_T=scores.logprobs_T.detach().cpu(),
            entropy_T=scores.entropy_T.cpu(),
            clipped_T=loss.clipped_T.cpu(),
            losses_T=loss.loss_T.detach().cpu(),
        )
        return token_mean(loss.loss_T, mask_T, self.denominator), rows

    def _kl(self, reference: MegatronTrainer, logits_TV: Tensor, scores: SupportScores, microbatch: int) -> Tensor:
        """Exact KL to the reference over the support of each token, [T]."""
        batch = self.scorer.batches[microbatch]
        reference_logits_TV = reference.head(self.reference_inputs[microbatch])
        kept = self.scorer.kept(logits_TV, microbatch)
        with torch.no_grad():
            reference_scores = self.scorer.support(reference_logits_TV, microbatch)
        open_T = _tensor(batch.loss_mask, logits_TV) & ~kept.truncated
        temperatures_T = _tensor(batch.temperatures, logits_TV)
        return kl_kept(scores.kept_logprobs, reference_scores.kept_logprobs, kept) + kl_full(
            logits_TV, reference_logits_TV, temperatures_T, self.scorer.shard, select_T=open_T
        )
