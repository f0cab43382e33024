"""Exact KL over the full vocabulary between two models, from their hidden states and heads.

Runs in trainer processes. Slabs of columns as in `moerl.kernels.full`. Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moerl.contract.reasons import Reason
from moerl.errors import ContractError
from moerl.kernels.checks import check_rows, check_temperatures
from moerl.kernels.full import RunningSums, Slabs, add_slab_gradients
from moerl.kernels.head import HeadInputs


def kl_full(
    inputs: HeadInputs, reference: HeadInputs, temperatures_T: Tensor, select_T: Tensor | None = None
) -> Tensor:
    """Exact KL(p||q) over the full vocabulary, nats.

    `p = softmax(logits / temperature)` of `inputs`, `q` the same of `reference`; of one vocabulary, not necessarily
    of one width.

    Args:
        inputs: the model; carries the gradient.
        reference: another model's hidden states of the same rows, and its head; gets no gradient.
        temperatures_T: float, > 0 on selected rows.
        select_T: bool; rows to compute. All where None.

    Returns:
        [T], 0 on rows not selected.

    Raises:
        ContractError: shapes or shards disagree, or a temperature is not positive.
    """
    check_rows(inputs.num_rows, temperatures=temperatures_T)
    shards = [(shard.start, shard.end, shard.vocab_size) for shard in (reference.shard, inputs.shard)]
    if reference.num_rows != inputs.num_rows or shards[0] != shards[1]:
        raise ContractError(
            Reason.ROWS_DIFFER,
            field="reference",
            seen=f"{reference.num_rows} rows, shard {shards[0]}",
            expected=f"{inputs.num_rows} rows, shard {shards[1]}",
            remedy="run model and reference on the same microbatch, under the same tensor-parallel layout",
        )
    rows_R = torch.arange(inputs.num_rows, device=temperatures_T.device)
    if select_T is not None:
        check_rows(inputs.num_rows, select=select_T)
        rows_R = rows_R[select_T]
    temperatures_R = temperatures_T[rows_R]
    if not len(rows_R):
        # No gradient of the head either, which would be a whole matrix of zeros.
        return temperatures_T.new_zeros(inputs.num_rows, dtype=inputs.dtype)
    check_temperatures(temperatures_R)
    kl_R: Tensor = _WholeKL.apply(  # type: ignore[assignment]
        inputs.hidden_TH, inputs.weight_VpH, inputs, reference.detach(), rows_R, temperatures_R
    )
    return kl_R.new_zeros(inputs.num_rows).index_copy(0, rows_R, kl_R)


class _WholeKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VpH: Tensor,
        inputs: HeadInputs,
        reference: HeadInputs,
        rows_R: Tensor,
        temperatures_R: Tensor,
    ) -> Tensor:
        slabs = Slabs.of(inputs.detach(), rows_R, temperatures_R)
        reference_slabs = Slabs.of(reference, rows_R, temperatures_R)
        sums = RunningSums.empty(slabs, centred=False)
        reference_sums = RunningSums.empty(reference_slabs, centred=True)
        for span in slabs.spans():
            x_RC, y_RC = slabs.logits(span), reference_slabs.logits(span).to(inputs.dtype)
            sums.add(x_RC.clone(), x_RC - y_RC)
            reference_sums.add(y_RC)
        sums.merge(inputs.shard)
        reference_sums.merge(inputs.shard)
        # Log of the ratio of the normalisers; the large numbers cancel first, so the small ones count.
        log_z_gap_R = (sums.max_R - reference_sums.max_R) + (sums.sum_R.log() - reference_sums.sum_R.log())
        mean_gap_R = sums.weighted_R / sums.sum_R
        ctx.save_for_backward(
            hidden_TH, weight_VpH, reference.hidden_TH, reference.weight_VpH, rows_R, temperatures_R,
            sums.max_R + sums.sum_R.log(), mean_gap_R,
        )  # fmt: skip
        ctx.shard = inputs.shard
        return mean_gap_R - log_z_gap_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VpH, reference_TH, reference_VpH, rows_R, temperatures_R, log_sum_R, mean_gap_R = (
            ctx.saved_tensors
        )
        inputs = HeadInputs(hidden_TH, weight_VpH, ctx.shard)
        slabs = Slabs.of(inputs, rows_R, temperatures_R)
        reference_slabs = Slabs.of(HeadInputs(reference_TH, reference_VpH, ctx.shard), rows_R, temperatures_R)
        scale_R1 = grads[0][:, None] / slabs.temperatures_R1

        def gradient_of_logits(span: slice) -> Tensor:
            # d KL / d x_i = p_i (log p_i - log q_i - KL) = p_i (x_i - y_i - E_p[x - y])
            x_RC = slabs.logits(span)
            gap_RC = (x_RC - reference_slabs.logits(span)).sub_(mean_gap_R[:, None])
            return x_RC.sub_(log_sum_R[:, None]).exp_().mul_(gap_RC).mul_(scale_R1)

        grad_TH = torch.zeros_like(hidden_TH, dtype=inputs.dtype) if ctx.needs_input_grad[0] else None
        grad_VpH = torch.zeros_like(weight_VpH) if ctx.needs_input_grad[1] else None
        add_slab_gradients(slabs, gradient_of_logits, rows_R, grad_TH, grad_VpH)
        return (None if grad_TH is None else grad_TH.to(hidden_TH.dtype)), grad_VpH, None, None, None, None
