"""Exact scores over the whole vocabulary, in chunks of rows.

Runs in trainer processes. Each function reads the logits once forward and once backward, holds float32
copies of `chunk_rows` rows at a time, all-reduces a few numbers per row forward and communicates nothing
backward.
Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.kernels.checks import check_targets, check_temperatures
from moerl.kernels.vocab_parallel import VocabShard, check_logits, compute_dtype

DEFAULT_CHUNK_ROWS = 128
"""Rows per chunk: 128 rows of a 152k vocabulary are 78 MB in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class FullScores:
    """Scores over the whole vocabulary, one per scored row.

    logprobs_T: float32, nats, differentiable; log-prob of the target.
    entropy_T: float32, nats, without gradient.
    """

    logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Which rows to read and how: rows int64 [R], temperatures [R], the shard, rows per chunk."""

    rows_R: Tensor
    temperatures_R: Tensor
    shard: VocabShard
    chunk_rows: int

    def spans(self) -> Iterator[slice]:
        """Chunks of 0..R; none where this rank holds only padding columns."""
        if self.shard.num_real_columns:
            for start in range(0, len(self.rows_R), self.chunk_rows):
                yield slice(start, start + self.chunk_rows)

    def tempered(self, logits_TVp: Tensor, span: slice) -> Tensor:
        """A fresh copy of the real columns of one chunk, divided by the temperature."""
        x = logits_TVp[self.rows_R[span], : self.shard.num_real_columns].to(compute_dtype(logits_TVp))
        return x / self.temperatures_R[span, None].to(x.dtype)

    def empty_stats(self, logits_TVp: Tensor) -> tuple[Tensor, Tensor]:
        """[R] maxima (-inf) and [R] zeros to accumulate into."""
        zeros_R = logits_TVp.new_zeros(len(self.rows_R), dtype=compute_dtype(logits_TVp))
        return zeros_R.new_full(zeros_R.shape, float("-inf")), zeros_R

    def merge_max(self, local_max: Tensor) -> tuple[Tensor, Tensor]:
        """The maximum over all shards, and local minus global (0 for a shard that has no real column)."""
        global_max = self.shard.max_(local_max.clone())
        return global_max, torch.where(local_max.isneginf(), 0.0, local_max - global_max)


def score_full(
    logits_TVp: Tensor,
    target_ids_T: Tensor,
    temperatures_T: Tensor,
    shard: VocabShard,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    rows_R: Tensor | None = None,
) -> FullScores:
    """Exact log-prob of each target over the whole vocabulary, nats.

    `z_a - logsumexp(z)` with `z = logits / temperature`.

    Args:
        logits_TVp: this rank's logits, any float dtype; not written to.
        target_ids_T: int64 global ids. temperatures_T: float, > 0.
        shard: the columns this rank holds.
        chunk_rows: rows per chunk.
        rows_R: int64, distinct; score these rows only.

    Returns:
        `FullScores` of [T], or of [R] where `rows_R` is given.

    Raises:
        ContractError: a scored target outside the vocabulary, or a temperature that is not positive.
    """
    check_logits(logits_TVp, shard, target_ids=target_ids_T, temperatures=temperatures_T)
    plan = _plan(logits_TVp, temperatures_T, shard, chunk_rows, rows_R)
    target_ids_R = target_ids_T[plan.rows_R]
    check_targets(target_ids_R, shard.vocab_size)
    logprobs_R, entropy_R = _FullScore.apply(logits_TVp, target_ids_R, plan)  # type: ignore[misc]
    return FullScores(logprobs_R, entropy_R)


def kl_full(
    logits_TVp: Tensor,
    reference_logits_TVp: Tensor,
    temperatures_T: Tensor,
    shard: VocabShard,
    select_T: Tensor | None = None,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> Tensor:
    """Exact KL(p||q) over the whole vocabulary, nats.

    `p = softmax(logits / temperature)`, `q = softmax(reference_logits / temperature)`.

    Args:
        logits_TVp: this rank's logits; carry the gradient.
        reference_logits_TVp: the reference's logits of the same columns; get no gradient.
        temperatures_T: float, > 0.
        shard: the columns this rank holds, of both.
        select_T: bool; rows to compute. All where None.
        chunk_rows: rows per chunk.

    Returns:
        float32 [T], 0 on rows not selected.

    Raises:
        ContractError: shapes disagree, or a temperature is not positive.
    """
    check_logits(logits_TVp, shard, temperatures=temperatures_T)
    check_logits(reference_logits_TVp, shard, temperatures=temperatures_T)
    rows_R = None if select_T is None else select_T.nonzero().flatten()
    plan = _plan(logits_TVp, temperatures_T, shard, chunk_rows, rows_R)
    kl_R: Tensor = _FullKL.apply(logits_TVp, reference_logits_TVp.detach(), plan)  # type: ignore[assignment]
    return kl_R.new_zeros(len(logits_TVp)).index_add(0, plan.rows_R, kl_R)


def _plan(
    logits_TVp: Tensor, temperatures_T: Tensor, shard: VocabShard, chunk_rows: int, rows_R: Tensor | None
) -> _Rows:
    if rows_R is None:
        rows_R = torch.arange(len(logits_TVp), device=logits_TVp.device)
    temperatures_R = temperatures_T[rows_R]
    check_temperatures(temperatures_R)
    return _Rows(rows_R, temperatures_R, shard, chunk_rows)


class _FullScore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TVp: Tensor, target_ids_R: Tensor, plan: _Rows) -> tuple[Tensor, Tensor]:
        max_R, sum_R = plan.empty_stats(logits_TVp)
        weighted_R = sum_R.clone()
        for span in plan.spans():
            x = plan.tempered(logits_TVp, span)
            max_R[span] = x.amax(-1)
            x -= max_R[span, None]
            e = x.exp()
            sum_R[span] = e.sum(-1)
            weighted_R[span] = e.mul_(x).sum(-1)
        # Each shard's sums are relative to its own maximum; bring them to the common one, then add.
        max_R, delta_R = plan.merge_max(max_R)
        scale_R = delta_R.exp()
        columns_R, own_R = plan.shard.local(target_ids_R)
        target_R = logits_TVp[plan.rows_R, columns_R].to(sum_R.dtype) / plan.temperatures_R.to(sum_R.dtype)
        target_R = torch.where(own_R, target_R, 0.0)
        sum_R, weighted_R, target_R = plan.shard.sum_(
            torch.stack([sum_R * scale_R, (weighted_R + delta_R * sum_R) * scale_R, target_R])
        )
        ctx.save_for_backward(logits_TVp, columns_R, own_R, max_R, sum_R)
        ctx.plan = plan
        entropy_R = sum_R.log() - weighted_R / sum_R
        ctx.mark_non_differentiable(entropy_R)
        return target_R - max_R - sum_R.log(), entropy_R

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_TVp, columns_R, own_R, max_R, sum_R = ctx.saved_tensors
        plan: _Rows = ctx.plan
        grad_TVp = torch.zeros_like(logits_TVp, memory_format=torch.contiguous_format)
        scale_R = grads[0] / plan.temperatures_R.to(grads[0].dtype)
        for span in plan.spans():
            x = plan.tempered(logits_TVp, span)
            x = (x - max_R[span, None]).exp_().div_(-sum_R[span, None])
            # Added before the cast: in bfloat16 the difference `1 - p` of a likely target would be lost.
            columns = columns_R[span, None].clamp(max=x.shape[1] - 1)
            x.scatter_add_(1, columns, own_R[span, None].to(x.dtype))
            grad_TVp[plan.rows_R[span], : x.shape[1]] = x.mul_(scale_R[span, None]).to(grad_TVp.dtype)
        return grad_TVp, None, None


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TVp: Tensor, reference_logits_TVp: Tensor, plan: _Rows) -> Tensor:
        max_R, sum_R = plan.empty_stats(logits_TVp)
        reference_max_R, reference_sum_R = max_R.clone(), sum_R.clone()
        gap_R = sum_R.clone()
        for span in plan.spans():
            x = plan.tempered(logits_TVp, span)
            y = plan.tempered(reference_logits_TVp, span).to(x.dtype)
            max_R[span], reference_max_R[span] = x.amax(-1), y.amax(-1)
            e = (x - max_R[span, None]).exp_()
            sum_R[span] = e.sum(-1)
            gap_R[span] = (e * (x - y)).sum(-1)
            reference_sum_R[span] = y.sub_(reference_max_R[span, None]).exp_().sum(-1)
        max_R, delta_R = plan.merge_max(max_R)
        reference_max_R, reference_delta_R = plan.merge_max(reference_max_R)
        sum_R, gap_R, reference_sum_R = plan.shard.sum_(
            torch.stack([sum_R * delta_R.exp(), gap_R * delta_R.exp(), reference_sum_R * reference_delta_R.exp()])
        )
        # Log of the ratio of the normalisers; the large numbers cancel first, so the small ones count.
        log_z_gap_R = (max_R - reference_max_R) + (sum_R.log() - reference_sum_R.log())
        kl_R = gap_R / sum_R - log_z_gap_R
        ctx.save_for_backward(logits_TVp, reference_logits_TVp, max_R, sum_R, kl_R + log_z_gap_R)
        ctx.plan = plan
        return kl_R

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_TVp, reference_logits_TVp, max_R, sum_R, mean_gap_R = ctx.saved_tensors
        plan: _Rows = ctx.plan
        grad_TVp = torch.zeros_like(logits_TVp, memory_format=torch.contiguous_format)
        scale_R = grads[0] / plan.temperatures_R.to(grads[0].dtype) / sum_R
        for span in plan.spans():
            x = plan.tempered(logits_TVp, span)
            y = plan.tempered(reference_logits_TVp, span).to(x.dtype)
            # d KL / d x_i = p_i (log p_i - log q_i - KL) = p_i (x_i - y_i - E_p[x - y])
            gap = (x - y).sub_(mean_gap_R[span, None])
            grad = x.sub_(max_R[span, None]).exp_().mul_(gap).mul_(scale_R[span, None])
            grad_TVp[plan.rows_R[span], : x.shape[1]] = grad.to(grad_TVp.dtype)
        return grad_TVp, None, None
