"""Logits at listed pairs (row, id) from hidden states and head, and their gradients, on a CPU.

Runs in trainer processes (on GPUs `moerl.kernels.device_pairs`). Reads only the listed rows of the head. A rank sorts
the pairs it owns by id once; the number of its pairs then decides how an id is computed:

- *rare* ids as sparse dot products, with torch's compressed sparse rows, in slabs, so that few gathered rows of the
  head exist at a time;
- *common* ids, listed by at least one row in `DENSE_ADVANTAGE`, as columns of a matrix product with all rows, in
  slabs. A set that lists everything thereby becomes the dense pass, in bounded memory.

Deterministic: every sum has one writer and a fixed order. Sums are float32 (float64 for float64 inputs); the
gradient of the head is rounded once. Shape legend: `moerl/kernels/segments.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moerl.kernels.head import HeadInputs
from moerl.kernels.products import matmul, slab_columns
from moerl.kernels.segments import Segments, SortedPairs

DENSE_ADVANTAGE = 8
"""A multiply-add of a sparse dot product lasts as long as this many of a matrix product: measured on a CPU
(`bench/kept_scoring.py`). It moves the crossover, not the result."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a microbatch that this rank owns, in two parts."""

    rare: Segments
    """Pairs of ids that few rows list."""
    common: Segments
    """Pairs of ids that at least one row in `DENSE_ADVANTAGE` lists."""
    num_listed: int
    """N, of all ranks."""


def plan_pairs(sorted_pairs: SortedPairs, num_rows: int) -> Pairs:
    """Divides the pairs of `num_rows` rows that this rank owns into rare and common ones."""
    is_common_U = sorted_pairs.counts_U * DENSE_ADVANTAGE >= num_rows
    return Pairs(
        segments_of(sorted_pairs.chosen(~is_common_U)),
        segments_of(sorted_pairs.chosen(is_common_U)),
        sorted_pairs.num_listed,
    )


def segments_of(pairs: SortedPairs) -> Segments:
    """Returns pairs as tensors on the CPU."""
    offsets_U1 = np.concatenate([[0], np.cumsum(pairs.counts_U)]).astype(np.int64)
    return Segments(*map(torch.from_numpy, (pairs.positions_P, pairs.rows_P, pairs.columns_U, offsets_U1)))


def pair_logits(inputs: HeadInputs, pairs: Pairs) -> Tensor:
    """Returns the logits of the pairs that this rank owns, 0 for the others: [N], not yet summed over ranks."""
    z_N = inputs.hidden_TH.new_zeros(pairs.num_listed, dtype=inputs.dtype)
    if len(pairs.rare):
        z_N[pairs.rare.positions_P] = _rare_logits(inputs, pairs.rare)
    for _, slab in pairs.common.slabs(slab_columns(*inputs.hidden_TH.shape)):
        weight_UH = inputs.weight_VpH.index_select(0, slab.columns_U)
        z_TU = matmul(inputs.hidden_TH, weight_UH.t())
        z_N[slab.positions_P] = z_TU[slab.rows_P, slab.slots()]
    return z_N


def add_pair_gradients(
    inputs: HeadInputs, pairs: Pairs, grad_N: Tensor, grad_TH: Tensor | None, grad_VpH: Tensor | None
) -> None:
    """Adds the gradient of `pair_logits` to `grad_TH` ([T, H], dtype of scores) and writes the listed rows of
    `grad_VpH` (dtype of the head)."""
    if len(pairs.rare):
        _add_rare_gradients(inputs, pairs.rare, grad_N[pairs.rare.positions_P], grad_TH, grad_VpH)
    for _, slab in pairs.common.slabs(slab_columns(*inputs.hidden_TH.shape)):
        grad_TU = grad_N.new_zeros(inputs.num_rows, len(slab.columns_U))
        grad_TU[slab.rows_P, slab.slots()] = grad_N[slab.positions_P]
        if grad_TH is not None:
            grad_TH += matmul(grad_TU, inputs.weight_VpH.index_select(0, slab.columns_U))
        if grad_VpH is not None:
            grad_UH = matmul(grad_TU.t(), inputs.hidden_TH)
            grad_VpH.index_copy_(0, slab.columns_U, grad_UH.to(grad_VpH.dtype))


def _rare_logits(inputs: HeadInputs, segments: Segments) -> Tensor:
    """Returns `hidden[row] . weight[column]` of each pair, [P]."""
    z_P = inputs.hidden_TH.new_zeros(len(segments), dtype=inputs.dtype)
    hidden_TH = inputs.hidden_TH.to(inputs.dtype)
    for span, slab, weight_UH in _slabs(inputs, segments):
        pattern_UT = _sparse(slab.offsets_U1, slab.rows_P, z_P[span], inputs.num_rows)
        z_P[span] = torch.sparse.sampled_addmm(pattern_UT, weight_UH, hidden_TH.t(), beta=0.0).values()
    return z_P


def _add_rare_gradients(
    inputs: HeadInputs, segments: Segments, grad_P: Tensor, grad_TH: Tensor | None, grad_VpH: Tensor | None
) -> None:
    """Adds the gradient of `_rare_logits` to `grad_TH` and writes the rows `segments.columns_U` of `grad_VpH`."""
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
