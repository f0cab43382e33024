"""Joining and cutting ragged kept sets. Any process; numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import KeptSets


def concat_kept_sets(parts: Sequence[KeptSets]) -> KeptSets:
    """Returns the rows of all parts, in order, as one CSR pair. No parts give no rows."""
    if not parts:
        return KeptSets.empty(0)
    lengths = np.concatenate([part.sizes for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return KeptSets(offsets, np.concatenate([part.ids for part in parts]))


def take_kept_sets(kept: KeptSets, rows: NDArray[np.integer]) -> KeptSets:
    """Returns the kept sets of `rows`, in that order. Raises IndexError for a row that is not there."""
    sizes = kept.sizes[rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    ids = np.arange(offsets[-1]) + np.repeat(kept.offsets[:-1][rows] - offsets[:-1], sizes)
    return KeptSets(offsets, kept.ids[ids])


def slice_kept_sets(kept: KeptSets, start: int, stop: int) -> KeptSets:
    """Returns rows [start, stop) with offsets that start at 0 again; `ids` is a view.

    Raises:
        IndexError: Not 0 <= start <= stop <= rows.
    """
    num_rows = len(kept.offsets) - 1
    if not 0 <= start <= stop <= num_rows:
        raise IndexError(f"rows [{start}, {stop}) of {num_rows} kept sets")
    offsets = kept.offsets[start : stop + 1]
    return KeptSets(offsets - offsets[0], kept.ids[offsets[0] : offsets[-1]])
