"""Scores on a GPU, forward and backward in a few launches, without a wait for the device. Runs in trainer processes.

Forward: dot products of the listed pairs, then a log-softmax per set. Backward: the gradient of these logits, then one
kernel for the gradient of hidden states and one for that of the head, which writes every row of it once, or adds to the
rows of a sum. Ids that many rows list add products of matrices, rows over the full vocabulary the slabs of
`moerl.kernels.full`.
Shape legend: `moerl/kernels/device_pairs.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moerl.kernels import sparse_triton
from moerl.kernels.device_pairs import DevicePairs
from moerl.kernels.full import FullGradients, HeadGradients, add_full_gradients, full_row_scores
from moerl.kernels.head import HeadInputs
from moerl.kernels.plan import DeviceListed, ScorePlan
from moerl.kernels.products import add_product, matmul, write_product


class DeviceScores(torch.autograd.Function):
    """Log-probs [T], entropies [T] and log-probs of all listed ids [N] in kept sets, 0 on other rows; log-probs and
    entropies over the full vocabulary [R].

    One function for all, so that the head gets one dense gradient: that of sets is written, others are added; all are
    added to `HeadInputs.main_grad_VpH` if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VpH: Tensor, entered: HeadInputs, plan: ScorePlan
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        inputs = HeadInputs(hidden_TH.contiguous(), weight_VpH.contiguous(), entered.shard)
        assert isinstance(plan.listed, DeviceListed)
        logprobs_T, entropy_T, kept_N = score_listed(inputs, plan, plan.listed)
        full_logprobs_R = full_entropy_R = log_sum_R = inputs.hidden_TH.new_empty(0, dtype=inputs.dtype)
        if len(plan.full_rows):
            full_logprobs_R, full_entropy_R, log_sum_R = full_row_scores(inputs, plan.full_rows)
        ctx.save_for_backward(hidden_TH, weight_VpH, entropy_T, kept_N, log_sum_R, full_entropy_R)
        ctx.main_grad_VpH, ctx.shard, ctx.plan = entered.main_grad_VpH, entered.shard, plan
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T, kept_N, full_logprobs_R, full_entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_TH, weight_VpH, entropy_T, kept_N, log_sum_R, full_entropy_R = ctx.saved_tensors
        plan: ScorePlan = ctx.plan
        inputs = HeadInputs(hidden_TH.contiguous(), weight_VpH.contiguous(), ctx.shard)
        assert isinstance(plan.listed, DeviceListed)
        pairs, of_sets, of_full = plan.listed.pairs, grads[:3], grads[3:]
        has_sets = bool(len(kept_N)) and any(each is not None for each in of_sets)
        has_full = bool(len(plan.full_rows)) and any(each is not None for each in of_full)
        grad_TH = grad_VpH = None
        if ctx.needs_input_grad[0]:
            # If nothing is added to the sums, the kernel rounds them to the dtype of hidden states.
            alone = has_sets and not has_full and not pairs.common
            make = torch.empty_like if has_sets else torch.zeros_like
            grad_TH = make(inputs.hidden_TH, dtype=hidden_TH.dtype if alone else inputs.dtype)
        is_new = ctx.main_grad_VpH is None
        if is_new and ctx.needs_input_grad[1]:
            make = torch.empty_like if has_sets or has_full else torch.zeros_like
            grad_VpH = make(inputs.weight_VpH)
        elif ctx.needs_input_grad[1]:
            grad_VpH = ctx.main_grad_VpH
        if has_sets:
            grad_N = sparse_triton.sets_gradient(
                (entropy_T, kept_N), plan.temperatures_T, plan.kept.offsets, plan.listed.targets_T,
                (of_sets[0], of_sets[1], of_sets[2]),
            )  # fmt: skip
            write_pair_gradients(inputs, pairs, grad_N, HeadGradients(grad_TH, grad_VpH, is_new))
        if has_full:
            full = FullGradients(log_sum_R, full_entropy_R, of_full[0], of_full[1])
            into = HeadGradients(grad_TH, grad_VpH, is_new=is_new and not has_sets)
            add_full_gradients(inputs, plan.full_rows, full, into)
        grad_tH = None if grad_TH is None else grad_TH.to(hidden_TH.dtype)
        return grad_tH, grad_VpH if is_new else None, None, None


def score_listed(inputs: HeadInputs, plan: ScorePlan, listed: DeviceListed) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs [T], entropies [T] and log-probs of all listed ids [N] in kept sets, 0 on other rows."""
    num_listed = len(plan.kept.ids)
    if not num_listed:
        nothing_T = inputs.hidden_TH.new_zeros(inputs.num_rows, dtype=inputs.dtype)
        return nothing_T, nothing_T.clone(), nothing_T.new_zeros(0)
    make = inputs.hidden_TH.new_empty if listed.pairs.writes_all else inputs.hidden_TH.new_zeros
    z_N = make(num_listed, dtype=inputs.dtype)
    sparse_triton.dots(inputs, listed.pairs, z_N)
    for slab in listed.pairs.common:
        z_TU = matmul(inputs.hidden_TH, inputs.weight_VpH.index_select(0, slab.columns_U).t())
        z_N.index_copy_(0, slab.positions_Q, z_TU.flatten().index_select(0, slab.cells_Q))
    inputs.shard.sum_(z_N)
    return sparse_triton.score_sets(z_N, plan.temperatures_T, plan.kept.offsets, listed.targets_T)


def write_pair_gradients(inputs: HeadInputs, pairs: DevicePairs, grad_N: Tensor, into: HeadGradients) -> None:
    """Writes the gradient of the listed pairs' logits to every row of `into`, or adds it to the head's if that is not
    new.

    That of hidden states has the dtype of scores if there are common ids, else any.
    """
    grad_TH, grad_VpH = into.hidden_TH, into.head_VpH
    if grad_TH is not None:
        sparse_triton.add_up(pairs.by_row, inputs.weight_VpH, grad_N, grad_TH)
    if grad_VpH is not None:
        sparse_triton.add_up(pairs.by_column, inputs.hidden_TH, grad_N, grad_VpH, add=not into.is_new)
    for slab in pairs.common:
        weight_UH = inputs.weight_VpH.index_select(0, slab.columns_U)
        grad_TU = weight_UH.new_zeros(inputs.num_rows, len(weight_UH))
        grad_Q = grad_N.index_select(0, slab.positions_Q).to(grad_TU.dtype)
        grad_TU.flatten().index_copy_(0, slab.cells_Q, grad_Q)
        if grad_TH is not None:
            add_product(grad_TH, grad_TU, weight_UH)
        if grad_VpH is not None:
            grad_UH = torch.empty_like(weight_UH) if into.is_new else grad_VpH.index_select(0, slab.columns_U)
            write_product(grad_UH, grad_TU.t(), inputs.hidden_TH, add=not into.is_new)
            grad_VpH.index_copy_(0, slab.columns_U, grad_UH)
