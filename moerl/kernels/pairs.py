"""Logits at listed pairs (row, id) from hidden states and head, and their gradients, on a CPU.

Runs in trainer processes (on GPUs `moerl.kernels.device_pairs`). Reads only the listed rows of the head. A rank sorts
the pairs it owns by id once; the number of its pairs then decides how an id is computed:

- *rare* ids as sparse dot products, with torch's compressed sparse rows, in slabs, so that few gathered rows of the
  head exist at a time;
- *common* ids, listed by at least one row in `DENSE_ADVANTAGE`, as columns of a matrix product with all rows, in
  slabs. A set that lists everything thereby becomes the dense pass, in bounded memory.

Deterministic: every sum has one writer and a fixed order. Sums are float32 (float64 for float64 inputs); a gradient of
the head that is not added to a float32 sum is rounded once here. Shape legend: `moerl/kernels/__init__.py`; P = the
listed pairs that this rank owns, sorted by id, U = its distinct ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from moerl.kernels.head import HeadInputs, VocabShard
from moerl.kernels.products import matmul, slab_columns

DENSE_ADVANTAGE = 8
"""A multiply-add of a sparse dot product lasts as long as this many of a matrix product: measured on a CPU
(`bench/kept_scoring.py`). It moves the crossover, not the result."""


@dataclass(frozen=True, slots=True, eq=False)
class SortedPairs:
    """Pairs on the host, sorted by id; all arrays int64."""

    positions_P: NDArray[np.int64]
    """Place of each pair among the N listed ones."""
    rows_P: NDArray[np.int64]
    """Row of each pair, ascending within an id."""
    columns_U: NDArray[np.int64]
    """Local columns of the distinct ids, ascending."""
    counts_U: NDArray[np.int64]
    """Pairs of each id."""
    num_listed: int
    """Listed ids that positions count, of all ranks: all N, or those of selected rows."""

    @classmethod
    def of(cls, rows_N: NDArray[np.int64], ids_N: NDArray[np.int64], shard: VocabShard) -> SortedPairs:
        """Sorts the listed pairs (row, global id) that this rank owns; rows ascending, no pair twice."""
        positions_P, counts_V = _by_column(ids_N - shard.start, shard.num_real_columns)
        columns_U = np.flatnonzero(counts_V)
        return cls(positions_P, rows_N[positions_P], columns_U, counts_V[columns_U], len(rows_N))

    def chosen(self, chosen_U: NDArray[np.bool_]) -> SortedPairs:
        """Returns the pairs of some of the ids."""
        chosen_P = np.repeat(chosen_U, self.counts_U)
        return SortedPairs(
            self.positions_P[chosen_P],
            self.rows_P[chosen_P],
            self.columns_U[chosen_U],
            self.counts_U[chosen_U],
            self.num_listed,
        )


@njit(nogil=True, cache=True)
def _by_column(columns_N: Any, num_columns: int) -> Any:
    """Returns the places of the columns in [0, num_columns), sorted stably by column, and the count of each column."""
    counts = np.zeros(num_columns, np.int64)
    for column in columns_N:
        if 0 <= column < num_columns:
            counts[column] += 1
    nexts = np.cumsum(counts) - counts
    places = np.empty(counts.sum(), np.int64)
    for place, column in enumerate(columns_N):
        if 0 <= column < num_columns:
            places[nexts[column]] = place
            nexts[column] += 1
    return places, counts


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Pairs sorted by id, as int64 tensors on the CPU."""

    positions_P: Tensor
    """Place of each pair among the N listed ones."""
    rows_P: Tensor
    """Row of each pair, ascending within an id."""
    columns_U: Tensor
    """Local columns of the distinct ids, ascending."""
    offsets_U1: Tensor
    """[U + 1]; id u has the pairs offsets_U1[u]:offsets_U1[u + 1]."""

    @classmethod
    def of(cls, pairs: SortedPairs) -> Segments:
        offsets_U1 = np.concatenate([[0], np.cumsum(pairs.counts_U)]).astype(np.int64)
        return cls(*map(torch.from_numpy, (pairs.positions_P, pairs.rows_P, pairs.columns_U, offsets_U1)))

    def __len__(self) -> int:
        return len(self.positions_P)

    def slabs(self, ids_per_slab: int) -> Iterator[tuple[slice, Segments]]:
        """Yields consecutive ids with their pairs, each after the span of these pairs among the P."""
        starts = range(0, len(self.columns_U), ids_per_slab)
        ends = [min(start + ids_per_slab, len(self.columns_U)) for start in starts]
        bounds = self.offsets_U1[[0, *ends]].tolist()
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            span = slice(bounds[index], bounds[index + 1])
            offsets = self.offsets_U1[start : end + 1] - bounds[index]
            yield span, Segments(self.positions_P[span], self.rows_P[span], self.columns_U[start:end], offsets)

    def slots(self) -> Tensor:
        """Returns for each pair the number of its id among the U ids, [P]."""
        sizes_U = self.offsets_U1.diff()
        return torch.repeat_interleave(sizes_U, output_size=len(self))


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a microbatch that this rank owns, in two parts."""

    rare: Segments
    """Pairs of ids that few rows list."""
    common: Segments
    """Pairs of ids that at least one row in `DENSE_ADVANTAGE` lists."""
    num_listed: int
    """Listed ids that positions count, of all ranks: all N, or those of selected rows."""


def plan_pairs(sorted_pairs: SortedPairs, num_rows: int) -> Pairs:
    """Divides the pairs of `num_rows` rows that this rank owns into rare and common ones."""
    is_common_U = sorted_pairs.counts_U * DENSE_ADVANTAGE >= num_rows
    return Pairs(
        Segments.of(sorted_pairs.chosen(~is_common_U)),
        Segments.of(sorted_pairs.chosen(is_common_U)),
        sorted_pairs.num_listed,
    )


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
    """Adds the gradient of `pair_logits` to `grad_TH` ([T, H], dtype of scores) and `grad_VpH` (dtype of the head, or
    float32)."""
    if len(pairs.rare):
        _add_rare_gradients(inputs, pairs.rare, grad_N[pairs.rare.positions_P], grad_TH, grad_VpH)
    for _, slab in pairs.common.slabs(slab_columns(*inputs.hidden_TH.shape)):
        grad_TU = grad_N.new_zeros(inputs.num_rows, len(slab.columns_U))
        grad_TU[slab.rows_P, slab.slots()] = grad_N[slab.positions_P]
        if grad_TH is not None:
            grad_TH += matmul(grad_TU, inputs.weight_VpH.index_select(0, slab.columns_U))
        if grad_VpH is not None:
            grad_UH = matmul(grad_TU.t(), inputs.hidden_TH)
            grad_VpH.index_add_(0, slab.columns_U, grad_UH.to(grad_VpH.dtype))


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
    """Adds the gradient of `_rare_logits` to `grad_TH`, and to the rows `segments.columns_U` of `grad_VpH`."""
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
            grad_VpH.index_add_(0, slab.columns_U, (grad_UT @ hidden_TH).to(grad_VpH.dtype))


def _slabs(inputs: HeadInputs, segments: Segments) -> Iterator[tuple[slice, Segments, Tensor]]:
    for span, slab in segments.slabs(slab_columns(*inputs.hidden_TH.shape)):
        yield span, slab, inputs.weight_VpH.index_select(0, slab.columns_U).to(inputs.dtype)


def _sparse(offsets: Tensor, columns: Tensor, values: Tensor, num_columns: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return torch.sparse_csr_tensor(
            offsets, columns, values, (len(offsets) - 1, num_columns), check_invariants=False
        )
