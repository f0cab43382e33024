"""Scores of sampled tokens from hidden states and head; logits of the full vocabulary are never held.

Runs in trainer processes of the last pipeline stage, on every tensor-parallel rank alike. Forward and backward are
deterministic. Communication of `score_kept`: one all-reduce of a number per listed id, and three of four in all per row
that is scored over the full vocabulary; none backward (`Head.enter` sums the gradients of hidden states). The inputs of
a pass are planned on the host (`moerl.kernels.plan`); on a GPU a pass launches a few kernels and waits for none. Shape
legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moerl.contract.reasons import Reason
from moerl.errors import ContractError
from moerl.kernels.full import FullGradients, FullRows, HeadGradients, add_full_gradients, full_row_scores
from moerl.kernels.head import HeadInputs
from moerl.kernels.kept import segment_log_softmax, segment_sum
from moerl.kernels.pairs import Pairs, add_pair_gradients, pair_logits
from moerl.kernels.plan import DeviceListed, Listed, ScorePlan


@dataclass(frozen=True, slots=True, eq=False)
class FullScores:
    """Scores over the full vocabulary, nats, float32 (float64 for float64 inputs), differentiable; 0 on rows not scored
    over it."""

    logprobs_T: Tensor
    """Log-prob of the target."""
    entropy_T: Tensor
    """Entropy of its distribution."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptScores:
    """Scores under the support each token was drawn from, nats, float32 (float64 for float64 inputs), differentiable; 0
    on rows not selected."""

    logprobs_T: Tensor
    """Log-prob of the target."""
    entropy_T: Tensor
    """Entropy of its distribution."""
    kept_logprobs_N: Tensor
    """Log-prob of every listed id within its set (for `kl_kept`)."""
    full: FullScores | None = None
    """Scores over the full vocabulary, of rows of `Rows.full_T` and open ones; None unless the plan has `full_T`."""


def score_kept(inputs: HeadInputs, plan: ScorePlan) -> KeptScores:
    """Returns the log-prob of each target under the distribution it was drawn from, with gradients.

    With `z = hidden @ weight.T / temperature`: `z_a - logsumexp(z[kept])` on rows that list a kept set, which reads
    the listed rows of the head only; `z_a - logsumexp(z)` over the full vocabulary on the others.

    Args:
        inputs: hidden states and head, from `Head.enter`.
        plan: the rows, from `moerl.kernels.plan.plan_rows` with the same head.

    Raises:
        ContractError: the plan is of another number of rows, or of another shard.
    """
    _check_plan(inputs, plan)
    logprobs_T, entropy_T, kept_N, full_logprobs_R, full_entropy_R = _all_scores(inputs, plan)
    full = None
    if len(plan.full_rows) or plan.with_full:
        full = _spread(inputs, plan.full_rows, full_logprobs_R, full_entropy_R)
        logprobs_T = torch.where(plan.open_T, full.logprobs_T, logprobs_T)
        entropy_T = torch.where(plan.open_T, full.entropy_T, entropy_T)
    return KeptScores(logprobs_T, entropy_T, kept_N, full if plan.with_full else None)


def score_full(inputs: HeadInputs, plan: ScorePlan) -> FullScores:
    """Returns the exact log-prob of each target over the full vocabulary, `z_a - logsumexp(z)`, and the entropy.

    The backward pass computes the logits again, slab by slab: a third more operations than with [T, V] kept, and none
    of its memory.

    Args:
        inputs: as `score_kept`.
        plan: as `score_kept`; rows that it scores in a kept set alone are 0.
    """
    _check_plan(inputs, plan)
    *_, logprobs_R, entropy_R = _all_scores(inputs, plan)
    return _spread(inputs, plan.full_rows, logprobs_R, entropy_R)


def listed_logprobs(inputs: HeadInputs, plan: ScorePlan) -> Tensor:
    """Returns the log-prob of every listed id within its set, [N], as `KeptScores.kept_logprobs_N`; without gradient.

    Scores nothing over the full vocabulary: `kl_kept` needs no more of a reference.
    """
    _check_plan(inputs, plan)
    with torch.no_grad():
        if isinstance(plan.listed, DeviceListed):
            from moerl.kernels.device_scores import score_listed

            return score_listed(inputs, plan, plan.listed)[2]
        z_E = inputs.shard.sum_(pair_logits(inputs, plan.listed.pairs))
        return _all_listed(_log_softmax(z_E, plan, plan.listed), plan, plan.listed)


def _check_plan(inputs: HeadInputs, plan: ScorePlan) -> None:
    if inputs.num_rows != plan.kept.num_rows or inputs.shard.bounds != plan.bounds:
        raise ContractError(
            Reason.ROWS_DIFFER,
            field="plan",
            seen=f"a plan of {plan.kept.num_rows} rows, shard {plan.bounds}",
            expected=f"{inputs.num_rows} rows, shard {inputs.shard.bounds}",
            remedy="plan the microbatch that the hidden states are of, for the head that scores it",
        )


def _all_scores(inputs: HeadInputs, plan: ScorePlan) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns log-probs [T], entropies [T] and log-probs of all listed ids [N] in kept sets, 0 on other rows; log-probs
    and entropies over the full vocabulary [R]."""
    listed = plan.listed
    if isinstance(listed, DeviceListed):
        from moerl.kernels.device_scores import DeviceScores

        return DeviceScores.apply(  # type: ignore[return-value]
            inputs.hidden_TH, inputs.weight_VpH, inputs, plan
        )
    scored: tuple[Tensor, Tensor, Tensor] = _Score.apply(  # type: ignore[assignment]
        inputs.hidden_TH, inputs.weight_VpH, inputs, listed.pairs, plan.full_rows
    )
    z_E, full_logprobs_R, full_entropy_R = scored
    logprobs_E = _log_softmax(z_E, plan, listed)
    entropy_T = -segment_sum(logprobs_E.exp() * logprobs_E, listed.rows_E, inputs.num_rows)
    logprobs_T = segment_sum(logprobs_E.masked_fill(~listed.is_target_E, 0), listed.rows_E, inputs.num_rows)
    return logprobs_T, entropy_T, _all_listed(logprobs_E, plan, listed), full_logprobs_R, full_entropy_R


def _log_softmax(z_E: Tensor, plan: ScorePlan, listed: Listed) -> Tensor:
    temperatures_E = plan.temperatures_T[listed.rows_E].to(z_E.dtype)
    return segment_log_softmax(z_E / temperatures_E, listed.rows_E, plan.kept.num_rows)


def _all_listed(logprobs_E: Tensor, plan: ScorePlan, listed: Listed) -> Tensor:
    """Returns the log-probs of all listed ids, [N]; 0 at ids of rows that are not selected."""
    if listed.entries_E is None:
        return logprobs_E
    return logprobs_E.new_zeros(len(plan.kept.rows)).index_copy(0, listed.entries_E, logprobs_E)


def _spread(inputs: HeadInputs, full_rows: FullRows, logprobs_R: Tensor, entropy_R: Tensor) -> FullScores:
    if full_rows.whole:
        return FullScores(logprobs_R, entropy_R)
    zeros_T = entropy_R.new_zeros(inputs.num_rows)
    return FullScores(
        zeros_T.index_copy(0, full_rows.rows_R, logprobs_R), zeros_T.index_copy(0, full_rows.rows_R, entropy_R)
    )


class _Score(torch.autograd.Function):
    """Logits at the pairs [E], log-probs and entropies of the rows scored over the full vocabulary [R]; on a CPU.

    One function for both, so that the head gets one dense gradient however it was used.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VpH: Tensor, inputs: HeadInputs, pairs: Pairs, full_rows: FullRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard = inputs.shard
        z_N = shard.sum_(pair_logits(inputs, pairs))
        logprobs_R, entropy_R, log_sum_R = full_row_scores(inputs, full_rows)
        ctx.save_for_backward(hidden_TH, weight_VpH, log_sum_R, entropy_R)
        ctx.main_grad_VpH, ctx.shard, ctx.pairs, ctx.full_rows = inputs.main_grad_VpH, shard, pairs, full_rows
        ctx.set_materialize_grads(False)
        return z_N, logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VpH, log_sum_R, entropy_R = ctx.saved_tensors
        inputs = HeadInputs(hidden_TH, weight_VpH, ctx.shard)
        grad_TH = torch.zeros_like(hidden_TH, dtype=inputs.dtype) if ctx.needs_input_grad[0] else None
        grad_VpH, is_new = None, ctx.main_grad_VpH is None
        if is_new and ctx.needs_input_grad[1]:
            grad_VpH = torch.zeros_like(weight_VpH, memory_format=torch.contiguous_format)
        elif ctx.needs_input_grad[1]:
            grad_VpH = ctx.main_grad_VpH
        grad_N, grad_R, grad_entropy_R = grads
        if grad_N is not None:
            add_pair_gradients(inputs, ctx.pairs, grad_N, grad_TH, grad_VpH)
        if grad_R is not None or grad_entropy_R is not None:
            full = FullGradients(log_sum_R, entropy_R, grad_R, grad_entropy_R)
            add_full_gradients(inputs, ctx.full_rows, full, HeadGradients(grad_TH, grad_VpH))
        grad_tH = None if grad_TH is None else grad_TH.to(hidden_TH.dtype)
        return grad_tH, grad_VpH if is_new else None, None, None, None
