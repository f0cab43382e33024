"""Exact KL over the full vocabulary between two models, from their hidden states and heads.

Runs in trainer processes. Slabs of columns as in `moerl.kernels.full`. Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moerl.contract.reasons import Reason
from moerl.errors import ContractError
from moerl.kernels.full import FullRows, HeadGradients, RunningSums, Slabs, add_slab_gradients
from moerl.kernels.head import HeadInputs


def kl_full(inputs: HeadInputs, reference: HeadInputs, rows: FullRows) -> Tensor:
    """Returns the exact KL(p||q) over the full vocabulary, nats.

    `p = softmax(logits / temperature)` of `inputs`, `q` the same of `reference`. Both models have one vocabulary, not
    necessarily one width.

    Args:
        inputs: the model; carries the gradient.
        reference: another model's hidden states of the same rows, and its head; gets no gradient.
        rows: to compute (`moerl.kernels.plan.plan_full`).

    Returns:
        [T], 0 on other rows.

    Raises:
        ContractError: shapes or shards disagree.
    """
    if reference.num_rows != inputs.num_rows or reference.shard.bounds != inputs.shard.bounds:
        raise ContractError(
            Reason.ROWS_DIFFER,
            field="reference",
            seen=f"{reference.num_rows} rows, shard {reference.shard.bounds}",
            expected=f"{inputs.num_rows} rows, shard {inputs.shard.bounds}",
            remedy="run model and reference on the same microbatch, under the same tensor-parallel layout",
        )
    if not len(rows):
        # No gradient of the head either, which would be a whole matrix of zeros.
        return inputs.hidden_TH.new_zeros(inputs.num_rows, dtype=inputs.dtype)
    kl_R: Tensor = _WholeKL.apply(  # type: ignore[assignment]
        inputs.hidden_TH, inputs.weight_VpH, inputs, reference.detach(), rows
    )
    return kl_R.new_zeros(inputs.num_rows).index_copy(0, rows.rows_R, kl_R)


class _WholeKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VpH: Tensor, inputs: HeadInputs, reference: HeadInputs, rows: FullRows
    ) -> Tensor:
        slabs, reference_slabs = Slabs.of(inputs.detach(), rows), Slabs.of(reference, rows)
        sums, reference_sums = (_device_sums if slabs.on_device else _sums)(slabs, reference_slabs)
        sums.merge(inputs.shard)
        reference_sums.merge(inputs.shard)
        # Log of the ratio of the normalisers; the large numbers cancel first, so the small ones count.
        log_z_gap_R = (sums.max_R - reference_sums.max_R) + (sums.sum_R.log() - reference_sums.sum_R.log())
        mean_gap_R = sums.weighted_R / sums.sum_R
        ctx.save_for_backward(
            hidden_TH, weight_VpH, reference.hidden_TH, reference.weight_VpH,
            sums.max_R + sums.sum_R.log(), mean_gap_R,
        )  # fmt: skip
        ctx.main_grad_VpH, ctx.rows, ctx.shard = inputs.main_grad_VpH, rows, inputs.shard
        return mean_gap_R - log_z_gap_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VpH, reference_TH, reference_VpH, log_sum_R, mean_gap_R = ctx.saved_tensors
        inputs, rows = HeadInputs(hidden_TH, weight_VpH, ctx.shard), ctx.rows
        slabs = Slabs.of(inputs, rows)
        reference_slabs = Slabs.of(HeadInputs(reference_TH, reference_VpH, ctx.shard), rows)
        of_slab = (_device_gradient if slabs.on_device else _gradient)(
            slabs, reference_slabs, (log_sum_R, mean_gap_R, grads[0])
        )
        grad_TH = torch.zeros_like(hidden_TH, dtype=inputs.dtype) if ctx.needs_input_grad[0] else None
        grad_VpH, is_new = None, ctx.main_grad_VpH is None
        if is_new and ctx.needs_input_grad[1]:
            # On a GPU every row is written by its slab; zeros before would be a pass over the whole matrix.
            make = torch.empty_like if slabs.on_device else torch.zeros_like
            grad_VpH = make(weight_VpH, memory_format=torch.contiguous_format)
        elif ctx.needs_input_grad[1]:
            grad_VpH = ctx.main_grad_VpH
        add_slab_gradients(slabs, of_slab, rows, HeadGradients(grad_TH, grad_VpH, is_new and slabs.on_device))
        grad_tH = None if grad_TH is None else grad_TH.to(hidden_TH.dtype)
        return grad_tH, grad_VpH if is_new else None, None, None, None


def _sums(slabs: Slabs, reference_slabs: Slabs) -> tuple[RunningSums, RunningSums]:
    """Returns the sums of this shard for both models."""
    sums = RunningSums.empty(slabs, centred=False)
    reference_sums = RunningSums.empty(reference_slabs, centred=True)
    for span in slabs.spans():
        x_RC, y_RC = slabs.logits(span), reference_slabs.logits(span).to(slabs.temperatures_R1.dtype)
        sums.add(x_RC.clone(), x_RC - y_RC)
        reference_sums.add(y_RC)
    return sums, reference_sums


def _device_sums(slabs: Slabs, reference_slabs: Slabs) -> tuple[RunningSums, RunningSums]:
    """Does the work of `_sums` on a GPU: two products and a kernel per slab."""
    from moerl.kernels import slabs_triton

    temperatures_R = slabs.temperatures_R1[:, 0]
    state_5R = slabs_triton.empty_state(temperatures_R, (0, 3), 5)
    for span in slabs.spans():
        slabs_triton.add_kl(slabs.products(span), reference_slabs.products(span), temperatures_R, state_5R)
    sums = RunningSums(state_5R[0], state_5R[1], state_5R[2], centred=False)
    return sums, RunningSums(state_5R[3], state_5R[4], torch.zeros_like(state_5R[4]), centred=False)


def _gradient(
    slabs: Slabs, reference_slabs: Slabs, per_row: tuple[Tensor, Tensor, Tensor]
) -> Callable[[slice], Tensor]:
    """Returns a function that computes the gradient of a slab of logits.

    per_row: `log sum exp`, expected difference of the logits, gradient of the KL.
    """
    log_sum_R, mean_gap_R, grad_R = per_row
    scale_R1 = grad_R[:, None] / slabs.temperatures_R1

    def gradient_of_logits(span: slice) -> Tensor:
        # d KL / d x_i = p_i (log p_i - log q_i - KL) = p_i (x_i - y_i - E_p[x - y])
        x_RC = slabs.logits(span)
        gap_RC = (x_RC - reference_slabs.logits(span)).sub_(mean_gap_R[:, None])
        return x_RC.sub_(log_sum_R[:, None]).exp_().mul_(gap_RC).mul_(scale_R1)

    return gradient_of_logits


def _device_gradient(
    slabs: Slabs, reference_slabs: Slabs, per_row: tuple[Tensor, Tensor, Tensor]
) -> Callable[[slice], Tensor]:
    """Does the work of `_gradient` on a GPU; gradients come in the dtype of the head."""
    from moerl.kernels import slabs_triton

    log_sum_R, mean_gap_R, grad_R = per_row
    rows = slabs.temperatures_R1[:, 0], log_sum_R, mean_gap_R, grad_R.contiguous()
    return lambda span: slabs_triton.kl_gradient(
        slabs.products(span), reference_slabs.products(span), rows, slabs.weight_VpH.dtype
    )
