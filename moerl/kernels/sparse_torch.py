"""Sparse dot products and their gradients with torch's compressed sparse rows. Runs in trainer processes on CPUs.

Goes through slabs of ids, so that few gathered rows of the head exist at a time.
Shape legend: `moerl/kernels/segments.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from moerl.kernels.head import HeadInputs
from moerl.kernels.products import slab_columns
from moerl.kernels.segments import Segments


def dots(inputs: HeadInputs, segments: Segments) -> Tensor:
    """Returns `hidden[row] . weight[column]` of each pair, [P]."""
    z_P = inputs.hidden_TH.new_zeros(len(segments), dtype=inputs.dtype)
    hidden_TH = inputs.hidden_TH.to(inputs.dtype)
    for span, slab, weight_UH in _slabs(inputs, segments):
        pattern_UT = _sparse(slab.offsets_U1, slab.rows_P, z_P[span], inputs.num_rows)
        z_P[span] = torch.sparse.sampled_addmm(pattern_UT, weight_UH, hidden_TH.t(), beta=0.0).values()
    return z_P


def add_gradients(
    inputs: HeadInputs, segments: Segments, grad_P: Tensor, grad_TH: Tensor | None, grad_VpH: Tensor | None
) -> None:
    """Adds the gradient of `dots` to `grad_TH` and writes the rows `segments.columns_U` of `grad_VpH`."""
    hidden_TH = inputs.hidden_TH.to(inputs.dtype)
    for span, slab, weight_UH in _slabs(inputs, segments):
        if grad_TH is not None:
            # Rows that list an id of this slab alone: a microbatch has many rows and many slabs.
            rows_P, order_P = slab.rows_P.sort(stable=True)
            rows_R, counts_R = torch.unique_consecutive(rows_P, return_counts=True)
            offsets_R1 = torch.nn.functional.pad(counts_R.cumsum(0), (1, 0))
            grad_RU = _sparse(offsets_R1, slab.slots()[order_P], grad_P[span][order_P], len(slab.columns_U))
            grad_TH.index_add_(0, rows_R, grad_RU @ weight_UH)
        if grad_VpH is not None:
            grad_UT = _sparse(slab.offsets_U1, slab.rows_P, grad_P[span], inputs.num_rows)
            grad_VpH.index_copy_(0, slab.columns_U, (grad_UT @ hidden_TH).to(grad_VpH.dtype))


def _slabs(inputs: HeadInputs, segments: Segments) -> Iterator[tuple[slice, Segments, Tensor]]:
    for span, slab in segments.slabs(slab_columns(*inputs.hidden_TH.shape)):
        yield span, slab, inputs.weight_VpH.index_select(0, slab.columns_U).to(inputs.dtype)


def _sparse(offsets: Tensor, columns: Tensor, values: Tensor, num_columns: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return torch.sparse_csr_tensor(
            offsets, columns, values, (len(offsets) - 1, num_columns), check_invariants=False
        )
