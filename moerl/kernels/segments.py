"""Listed pairs (row, id), sorted by id. Runs in trainer processes.

Shape legend: `moerl/kernels/__init__.py`; P = the listed pairs that this rank owns, sorted by id, U = its distinct ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from moerl.kernels.head import VocabShard


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
    """N, of all ranks."""

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
