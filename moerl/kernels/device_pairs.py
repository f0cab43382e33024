"""Listed pairs (row, id) as the kernels of a GPU read them: planned on the host, so that a pass never waits for the
device.

Runs in trainer processes. Ids that few rows list are computed pair by pair (`moerl.kernels.sparse_triton`), others as
columns of matrix products. A segment is a row with its rare pairs, or an id with them. No program sums more than
`LONGEST` pairs: longer segments are cut into parts, whose sums are then added in their order.

Shape legend: `moerl/kernels/__init__.py`; P = rare pairs of this rank, S = segments, C = parts of split segments, L =
split segments, Q = pairs of a slab of common ids, U = ids of a slab.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moerl.kernels.pairs import SortedPairs
from moerl.kernels.products import slab_columns
from moerl.kernels.transfer import under

DENSE_ADVANTAGE = 64
"""A multiply-add of a sparse dot product lasts as long as this many of a matrix product: a pair reads two bytes a
multiply-add from a cache of some 5 TB/s, and a product does some 300 T of them a second. Not measured. It moves the
crossover, not the result."""
LONGEST = 1024
"""Pairs that one program sums."""
LEFT_ALONE = -1
"""Count of a segment whose sum another kernel writes."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Segments, each a `sum over its pairs of factor[position] * source[source]`. int32 on the device."""

    positions_P: Tensor
    """Place of each pair among the N listed ones."""
    sources_P: Tensor
    """Row of the source that each pair reads."""
    starts_S: Tensor
    """First pair of each segment; its pairs are consecutive."""
    counts_S: Tensor
    """Pairs of each segment; 0 if its sum is zero, `LEFT_ALONE` if its sum is not written by this kernel."""
    part_starts_C: Tensor
    """First pair of each part of a split segment."""
    part_counts_C: Tensor
    """Pairs of each part, at most `LONGEST`."""
    split_L: Tensor
    """Segments that are split."""
    first_parts_L1: Tensor
    """[L + 1]; split segment l has the parts first_parts_L1[l]:first_parts_L1[l + 1]."""


@dataclass(frozen=True, slots=True, eq=False)
class CommonIds:
    """A slab of ids that many rows list. int64 on the device."""

    columns_U: Tensor
    """Local columns of the ids."""
    positions_Q: Tensor
    """Place of each pair among the N listed ones."""
    cells_Q: Tensor
    """Place of each pair in a flat [T, U]."""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePairs:
    """The listed pairs of a microbatch that this rank owns."""

    by_column: Sums
    """Rare pairs, one segment per column of the shard, with sources among rows: dot products, gradient of the head."""
    by_row: Sums
    """Rare pairs, one segment per row, with sources among columns: gradient of hidden states."""
    columns_P: Tensor
    """int32; column of each pair of `by_column`."""
    common: tuple[CommonIds, ...]
    """Slabs of the ids that are not rare."""
    writes_all: bool
    """True if every listed pair is rare and owned by this rank."""


def device_arrays(pairs: SortedPairs, num_rows: int, num_columns: int, width: int) -> Arrays:
    """Plans the pairs of a microbatch: the arrays of `DevicePairs`, to be sent with others (`device_pairs`).

    num_rows, num_columns, width: T, Vp and H.
    """
    is_common_U = pairs.counts_U * DENSE_ADVANTAGE >= num_rows
    rare = pairs.chosen(~is_common_U) if is_common_U.any() else pairs
    columns_P = np.repeat(rare.columns_U, rare.counts_U)
    counts_V = np.zeros(num_columns, np.int64)
    counts_V[rare.columns_U] = rare.counts_U
    arrays = {"columns_P": columns_P.astype(np.int32)}
    # Positions ascend with rows: sorted by them, pairs are sorted by row and then by id.
    order_P = _places(rare.positions_P, rare.num_listed)
    counts_T = np.bincount(rare.rows_P, minlength=num_rows)
    by_row = _sums(rare.positions_P[order_P], columns_P[order_P], counts_T)
    arrays |= {f"by_row.{name}": array for name, array in by_row.items()}
    common = list(_common(pairs.chosen(is_common_U), slab_columns(num_rows, width))) if is_common_U.any() else []
    by_column = _sums(rare.positions_P, rare.rows_P, counts_V)
    by_column["counts_S"][pairs.columns_U[is_common_U]] = LEFT_ALONE
    arrays |= {f"by_column.{name}": array for name, array in by_column.items()}
    for number, slab in enumerate(common):
        arrays |= {f"common.{number}.{name}": array for name, array in slab.items()}
    return arrays


def device_pairs(sent: dict[str, Tensor], num_listed: int) -> DevicePairs:
    """Returns the pairs of `device_arrays` from their tensors on the device. num_listed: N, of all ranks."""
    num_slabs = sum(name.startswith("common.") and name.endswith(".columns_U") for name in sent)
    return DevicePairs(
        Sums(**under(sent, "by_column.")),
        Sums(**under(sent, "by_row.")),
        sent["columns_P"],
        tuple(CommonIds(**under(sent, f"common.{number}.")) for number in range(num_slabs)),
        len(sent["columns_P"]) == num_listed,
    )


def _places(positions_P: NDArray[np.int64], num_listed: int) -> NDArray[np.int64]:
    """Returns the order that sorts distinct numbers in [0, num_listed)."""
    places_N = np.full(num_listed, -1)
    places_N[positions_P] = np.arange(len(positions_P))
    return places_N[places_N >= 0]


def _sums(positions_P: NDArray[np.int64], sources_P: NDArray[np.int64], counts_S: NDArray[np.int64]) -> Arrays:
    starts_S = np.cumsum(counts_S) - counts_S
    split_L = np.flatnonzero(counts_S > LONGEST)
    num_parts_L = -(-counts_S[split_L] // LONGEST)
    first_parts_L1 = np.concatenate([[0], np.cumsum(num_parts_L)])
    within_C = np.arange(first_parts_L1[-1]) - np.repeat(first_parts_L1[:-1], num_parts_L)
    part_starts_C = np.repeat(starts_S[split_L], num_parts_L) + within_C * LONGEST
    left_C = np.repeat(counts_S[split_L], num_parts_L) - within_C * LONGEST
    arrays = {
        "positions_P": positions_P,
        "sources_P": sources_P,
        "starts_S": starts_S,
        "counts_S": np.where(counts_S > LONGEST, LEFT_ALONE, counts_S),
        "part_starts_C": part_starts_C,
        "part_counts_C": np.minimum(left_C, LONGEST),
        "split_L": split_L,
        "first_parts_L1": first_parts_L1,
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def _common(pairs: SortedPairs, step: int) -> Iterator[Arrays]:
    """Yields slabs of at most `step` common ids, as fields of `CommonIds`."""
    bounds = np.concatenate([[0], np.cumsum(pairs.counts_U)])
    for first in range(0, len(pairs.columns_U), step):
        counts_U = pairs.counts_U[first : first + step]
        span = slice(bounds[first], bounds[first + len(counts_U)])
        slots_Q = np.repeat(np.arange(len(counts_U)), counts_U)
        yield {
            "columns_U": pairs.columns_U[first : first + step],
            "positions_Q": pairs.positions_P[span],
            "cells_Q": pairs.rows_P[span] * len(counts_U) + slots_Q,
        }
