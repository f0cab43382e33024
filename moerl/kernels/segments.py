"""Listed pairs (row, id), sorted by id. Runs in trainer processes.

Shape legend: `moerl/kernels/__init__.py`; P = the listed pairs that this rank owns, sorted by id, U = its distinct ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Pairs sorted by id.

    positions_P: where each pair stands among the N listed ones. rows_P: its row, ascending within an id.
    columns_U: local columns of the distinct ids, ascending. offsets_U1: [U + 1]; id u has the pairs
    offsets_U1[u]:offsets_U1[u + 1]. All int64.
    """

    positions_P: Tensor
    rows_P: Tensor
    columns_U: Tensor
    offsets_U1: Tensor

    def __len__(self) -> int:
        return len(self.positions_P)

    def slabs(self, ids_per_slab: int) -> Iterator[tuple[slice, Segments]]:
        """Consecutive ids with their pairs, and which of the P pairs those are."""
        starts = range(0, len(self.columns_U), ids_per_slab)
        ends = [min(start + ids_per_slab, len(self.columns_U)) for start in starts]
        bounds = self.offsets_U1[[0, *ends]].tolist()
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            span = slice(bounds[index], bounds[index + 1])
            offsets = self.offsets_U1[start : end + 1] - bounds[index]
            yield span, Segments(self.positions_P[span], self.rows_P[span], self.columns_U[start:end], offsets)

    def slots(self) -> Tensor:
        """Which of the U ids each pair has, [P]."""
        sizes_U = self.offsets_U1.diff()
        return torch.repeat_interleave(sizes_U, output_size=len(self))
