"""Scores of sampled tokens from hidden states and head; logits of the full vocabulary are never held.

Runs in trainer processes of the last pipeline stage, on every tensor-parallel rank alike. Forward and backward are
deterministic. Communication of `score_kept`: one all-reduce of a number per listed id, and of three per row that is
scored over the full vocabulary; none backward (`Head.enter` sums the gradients of hidden states).
Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moerl.kernels.checks import check_listed, check_rows, check_targets, check_temperatures
from moerl.kernels.full import FullGradients, FullRows, add_full_gradients, full_row_scores
from moerl.kernels.head import HeadInputs
from moerl.kernels.kept import KeptRows, segment_log_softmax, segment_sum
from moerl.kernels.pairs import Pairs, add_pair_gradients, pair_logits, plan_pairs
from moerl.kernels.vocab_parallel import VocabShard


@dataclass(frozen=True, slots=True, eq=False)
class FullScores:
    """Scores over the full vocabulary, nats, float32 (float64 for float64 inputs); 0 on rows not scored so.

    logprobs_T, entropy_T: [T], differentiable; log-prob of the target, and the entropy of its distribution.
    """

    logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KeptScores:
    """Scores under the support each token was drawn from, nats, float32 (float64 for float64 inputs).

    0 on rows not selected.

    logprobs_T, entropy_T: [T], differentiable; log-prob of the target, and the entropy of its distribution.
    kept_logprobs_N: [N], differentiable; log-prob of every listed id within its set (for `kl_kept`).
    full: the same rows' scores over the full vocabulary, where those were asked for.
    """

    logprobs_T: Tensor
    entropy_T: Tensor
    kept_logprobs_N: Tensor
    full: FullScores | None = None


def score_kept(
    inputs: HeadInputs,
    target_ids_T: Tensor,
    kept: KeptRows,
    temperatures_T: Tensor,
    select_T: Tensor | None = None,
    full_T: Tensor | None = None,
) -> KeptScores:
    """Log-prob of each target under the distribution it was drawn from, with gradients.

    With `z = hidden @ weight.T / temperature`: `z_a - logsumexp(z[kept])` on rows that list a kept set, which reads
    the listed rows of the head only; `z_a - logsumexp(z)` over the full vocabulary on the others.

    Args:
        inputs: hidden states and head, from `Head.enter`.
        target_ids_T: int64 global ids.
        kept: the kept sets of the same rows.
        temperatures_T: float, > 0 on scored rows.
        select_T: bool; rows to score (the sampled ones). All where None.
        full_T: bool; rows to score over the full vocabulary as well, all of them or a sample. Where None, only
            rows that list nothing are.

    Raises:
        ContractError: shapes disagree, a listed id or target lies outside the vocabulary, a listed set does
            not hold its target exactly once, or a scored row's temperature is not positive.
    """
    check_rows(inputs.num_rows, target_ids=target_ids_T, temperatures=temperatures_T, kept=kept.truncated)
    open_T, entries = ~kept.truncated, None
    if select_T is not None:
        check_rows(inputs.num_rows, select=select_T)
        open_T, entries = open_T & select_T, select_T[kept.rows].nonzero().flatten()
    rows_T = open_T
    if full_T is not None:
        check_rows(inputs.num_rows, full=full_T)
        rows_T = open_T | full_T
    rows, ids = (kept.rows, kept.ids) if entries is None else (kept.rows[entries], kept.ids[entries])
    is_target = ids == target_ids_T[rows]
    check_listed(rows, ids, is_target, kept, inputs.shard.vocab_size)
    check_temperatures(temperatures_T[rows])
    full_rows = _full_rows(inputs, target_ids_T, temperatures_T, rows_T)
    pairs = plan_pairs(rows, ids, inputs.num_rows, inputs.shard)
    z, full_logprobs_R, full_entropy_R = _score(inputs, pairs, full_rows)
    logprobs = segment_log_softmax(z / temperatures_T[rows].to(z.dtype), rows, kept.num_rows)
    full = _spread(inputs, full_rows, full_logprobs_R, full_entropy_R)
    entropy_T = -segment_sum(logprobs.exp() * logprobs, rows, kept.num_rows)
    listed_T = segment_sum(logprobs.masked_fill(~is_target, 0), rows, kept.num_rows)
    if entries is not None:
        logprobs = logprobs.new_zeros(len(kept.rows)).index_copy(0, entries, logprobs)
    return KeptScores(
        logprobs_T=torch.where(open_T, full.logprobs_T, listed_T),
        entropy_T=torch.where(open_T, full.entropy_T, entropy_T),
        kept_logprobs_N=logprobs,
        full=None if full_T is None else full,
    )


def score_full(
    inputs: HeadInputs, target_ids_T: Tensor, temperatures_T: Tensor, select_T: Tensor | None = None
) -> FullScores:
    """Exact log-prob of each target over the full vocabulary, `z_a - logsumexp(z)`, and the entropy.

    The backward pass computes the logits again, slab by slab: a third more operations than keeping [T, V] would
    take, and none of its memory.

    Args: as `score_kept`.

    Raises:
        ContractError: shapes disagree, a scored target lies outside the vocabulary, or a scored row's temperature is
            not positive.
    """
    check_rows(inputs.num_rows, target_ids=target_ids_T, temperatures=temperatures_T)
    if select_T is None:
        select_T = torch.ones_like(target_ids_T, dtype=torch.bool)
    check_rows(inputs.num_rows, select=select_T)
    nothing = target_ids_T.new_zeros(0)
    full_rows = _full_rows(inputs, target_ids_T, temperatures_T, select_T)
    _, logprobs_R, entropy_R = _score(inputs, plan_pairs(nothing, nothing, inputs.num_rows, inputs.shard), full_rows)
    return _spread(inputs, full_rows, logprobs_R, entropy_R)


def _full_rows(inputs: HeadInputs, target_ids_T: Tensor, temperatures_T: Tensor, rows_T: Tensor) -> FullRows:
    rows_R = rows_T.nonzero().flatten()
    full_rows = FullRows(rows_R, temperatures_T[rows_R], target_ids_T[rows_R])
    check_targets(full_rows.target_ids_R, inputs.shard.vocab_size)
    check_temperatures(full_rows.temperatures_R)
    return full_rows


def _spread(inputs: HeadInputs, full_rows: FullRows, logprobs_R: Tensor, entropy_R: Tensor) -> FullScores:
    zeros_T = entropy_R.new_zeros(inputs.num_rows)
    return FullScores(
        zeros_T.index_copy(0, full_rows.rows_R, logprobs_R), zeros_T.index_copy(0, full_rows.rows_R, entropy_R)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    shard: VocabShard
    pairs: Pairs
    full_rows: FullRows


def _score(inputs: HeadInputs, pairs: Pairs, full_rows: FullRows) -> tuple[Tensor, Tensor, Tensor]:
    plan = _Plan(inputs.shard, pairs, full_rows)
    return _Score.apply(inputs.hidden_TH, inputs.weight_VpH, plan)  # type: ignore[return-value]


class _Score(torch.autograd.Function):
    """Logits at the pairs [N], log-probs and entropies of the rows scored over the full vocabulary [R].

    One function for both, so that the head gets one dense gradient however it was used.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VpH: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor]:
        inputs = HeadInputs(hidden_TH, weight_VpH, plan.shard)
        z_N = plan.shard.sum_(pair_logits(inputs, plan.pairs))
        logprobs_R, entropy_R, log_sum_R = full_row_scores(inputs, plan.full_rows)
        ctx.save_for_backward(hidden_TH, weight_VpH, log_sum_R, entropy_R)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return z_N, logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_TH, weight_VpH, log_sum_R, entropy_R = ctx.saved_tensors
        plan: _Plan = ctx.plan
        inputs = HeadInputs(hidden_TH, weight_VpH, plan.shard)
        grad_TH = torch.zeros_like(hidden_TH, dtype=inputs.dtype) if ctx.needs_input_grad[0] else None
        grad_VpH = None
        if ctx.needs_input_grad[1]:
            grad_VpH = torch.zeros_like(weight_VpH, memory_format=torch.contiguous_format)
        grad_N, grad_R, grad_entropy_R = grads
        if grad_N is not None:
            add_pair_gradients(inputs, plan.pairs, grad_N, grad_TH, grad_VpH)
        if grad_R is not None or grad_entropy_R is not None:
            full = FullGradients(log_sum_R, entropy_R, grad_R, grad_entropy_R)
            add_full_gradients(inputs, plan.full_rows, full, grad_TH, grad_VpH)
        return (None if grad_TH is None else grad_TH.to(hidden_TH.dtype)), grad_VpH, None
