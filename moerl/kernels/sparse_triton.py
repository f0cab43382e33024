"""Sparse dot products and their gradients as Triton kernels. Runs in trainer processes on GPUs.

Reads each listed row of the head where it lies; nothing is gathered. One program writes each result: a pair's logit, a
piece of a row of the hidden states' gradient, a piece of a row of the head's gradient. Without atomics, so the same
bits every time. Shape legend: `moerl/kernels/segments.py`.
"""

# Triton infers the types of what a kernel takes.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moerl.kernels.head import HeadInputs
from moerl.kernels.segments import Segments

BLOCK_WIDTH = 512
"""Largest number of hidden dimensions that a program holds at a time."""


@triton.jit
def _dots_kernel(
    hidden_ptr, weight_ptr, rows_ptr, columns_ptr, out_ptr, width, BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    hidden_row = hidden_ptr + tl.load(rows_ptr + pair) * width
    weight_row = weight_ptr + tl.load(columns_ptr + pair) * width
    total = tl.zeros((BLOCK,), dtype=ACCUMULATE)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        hidden = tl.load(hidden_row + at, mask=inside, other=0.0).to(ACCUMULATE)
        total += hidden * tl.load(weight_row + at, mask=inside, other=0.0).to(ACCUMULATE)
    tl.store(out_ptr + pair, tl.sum(total, axis=0))


@triton.jit
def _segment_kernel(
    source_ptr, sources_ptr, factors_ptr, offsets_ptr, out_ptr, outs_ptr, width,
    BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """`out[outs[s]] (+)= sum over the pairs of segment s of factor * source[sources[pair]]`, one piece of columns."""
    segment = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), dtype=ACCUMULATE)
    for pair in range(tl.load(offsets_ptr + segment), tl.load(offsets_ptr + segment + 1)):
        values = tl.load(source_ptr + tl.load(sources_ptr + pair) * width + at, mask=inside, other=0.0)
        total += tl.load(factors_ptr + pair) * values.to(ACCUMULATE)
    out = out_ptr + tl.load(outs_ptr + segment) * width + at
    if ADD:
        total += tl.load(out, mask=inside, other=0.0)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def dots(inputs: HeadInputs, segments: Segments) -> Tensor:
    """`hidden[row] . weight[column]` of each pair, [P]."""
    hidden_TH, weight_VpH = inputs.hidden_TH.contiguous(), inputs.weight_VpH.contiguous()
    z_P = hidden_TH.new_empty(len(segments), dtype=inputs.dtype)
    columns_P = segments.columns_U[segments.slots()]
    width = hidden_TH.shape[1]
    _dots_kernel[(len(segments),)](hidden_TH, weight_VpH, segments.rows_P, columns_P, z_P, width, **_constants(inputs))
    return z_P


def add_gradients(
    inputs: HeadInputs, segments: Segments, grad_P: Tensor, grad_TH: Tensor | None, grad_VpH: Tensor | None
) -> None:
    """Adds the gradient of `dots` to `grad_TH` and writes the rows `segments.columns_U` of `grad_VpH`."""
    width = inputs.hidden_TH.shape[1]
    pieces = triton.cdiv(width, _constants(inputs)["BLOCK"])
    if grad_TH is not None:
        rows_P, order_P = segments.rows_P.sort(stable=True)
        rows_S, counts_S = torch.unique_consecutive(rows_P, return_counts=True)
        offsets_S1 = torch.nn.functional.pad(counts_S.cumsum(0), (1, 0))
        columns_P = segments.columns_U[segments.slots()[order_P]]
        _segment_kernel[(len(rows_S), pieces)](
            inputs.weight_VpH.contiguous(), columns_P, grad_P[order_P], offsets_S1, grad_TH, rows_S,
            width, **_constants(inputs, ADD=True),
        )  # fmt: skip
    if grad_VpH is not None:
        _segment_kernel[(len(segments.columns_U), pieces)](
            inputs.hidden_TH.contiguous(), segments.rows_P, grad_P.contiguous(), segments.offsets_U1, grad_VpH,
            segments.columns_U, width, **_constants(inputs, ADD=False),
        )  # fmt: skip


def _constants(inputs: HeadInputs, **more: Any) -> dict[str, Any]:
    return more | {
        "BLOCK": min(BLOCK_WIDTH, triton.next_power_of_2(inputs.hidden_TH.shape[1])),
        "ACCUMULATE": tl.float64 if inputs.dtype == torch.float64 else tl.float32,
    }
