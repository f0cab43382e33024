"""A growing pool of kept ids, so that recording a step's kept sets is one append whatever their sizes.

Runs inside the embedded rollout engine. Numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MIN_CAPACITY = 1 << 16


class KeptPool:
    """Kept sets one after the other in one int32 array; the caller remembers the start and the size of each."""

    def __init__(self) -> None:
        self._ids = np.empty(_MIN_CAPACITY, np.int32)
        self.num_used = 0

    def append(self, ids: NDArray[np.int32], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Adds the sets that lie one after the other in ids; returns their starts, int64 [len(sizes)]."""
        end = self.num_used + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
            grown[: self.num_used] = self._ids[: self.num_used]
            self._ids = grown
        self._ids[self.num_used : end] = ids
        starts = self.num_used + np.cumsum(sizes) - sizes
        self.num_used = end
        return starts

    def take(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the named sets, one after the other, as a new array."""
        shift = starts - (np.cumsum(sizes) - sizes)
        return self._ids[np.repeat(shift, sizes) + np.arange(int(sizes.sum()))]

    def keep_only(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drops every other set and frees their memory; returns the new starts."""
        kept = self.take(starts, sizes)
        self._ids = np.empty(max(_MIN_CAPACITY, 2 * len(kept)), np.int32)
        self.num_used = 0
        return self.append(kept, sizes)
