"""Local search for equal cost on all ranks: sequences move or change places between a dear rank and a cheap one. Pure;
any process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLOSE_ENOUGH = 1.02
"""Largest cost of a rank over the mean at which the search stops."""

# Every exchange looks at all pairs of sequences of two ranks; both limits only bound the time of hopeless cases.
_MAX_EXCHANGES = 256
_MAX_CANDIDATES = 512
_MAX_PARTNERS = 4


@dataclass(slots=True)
class Division:
    """Sequences in packs, packs on ranks. S = sequences, P = packs."""

    rows: NDArray[np.int64]
    """int64 [S]; rows of each sequence."""
    cost: NDArray[np.float64]
    """float64 [S]; cost of each sequence."""
    pack_of: NDArray[np.int64]
    """int64 [S]; pack of each sequence."""
    rank_of: NDArray[np.int64]
    """int64 [P]; rank of each pack, equally many packs per rank."""
    capacity: int
    """Most rows of a pack."""

    @property
    def pack_costs(self) -> NDArray[np.float64]:
        """float64 [P]: cost of each pack."""
        return np.bincount(self.pack_of, self.cost, len(self.rank_of))

    @property
    def rank_costs(self) -> NDArray[np.float64]:
        """float64 [ranks]: cost of each rank."""
        return np.bincount(self.rank_of, self.pack_costs)

    def by_rank(self) -> list[list[int]]:
        """Returns the packs of each rank, by falling cost."""
        order = np.argsort(-self.pack_costs, kind="stable")
        return [order[self.rank_of[order] == rank].tolist() for rank in range(int(self.rank_of.max()) + 1)]

    def improve(self) -> None:
        """Lowers the cost of the dearest rank until it is close enough to the mean or nothing helps.

        One exchange gives a sequence of the dearest rank to one of the cheapest, for a cheaper sequence or for none,
        such that both packs keep to the capacity. The pair that comes closest to halving the difference of the two
        ranks is exchanged, which makes the dearer of the two cheaper.
        """
        for _ in range(_MAX_EXCHANGES):
            costs = self.rank_costs
            order = np.argsort(costs, kind="stable")
            if costs[order[-1]] <= CLOSE_ENOUGH * costs.mean():
                return
            partners = order[: min(_MAX_PARTNERS, len(order) - 1)]
            if not any(self._exchange(int(order[-1]), int(cheap), costs) for cheap in partners):
                return

    def _exchange(self, dear: int, cheap: int, costs: NDArray[np.float64]) -> bool:
        pack_rows = np.bincount(self.pack_of, self.rows, len(self.rank_of)).astype(np.int64)
        packs = np.flatnonzero(self.rank_of == cheap)
        emptiest = packs[pack_rows[packs].argmin()]
        given, taken = self._sequences(dear), self._sequences(cheap)
        # The last candidate is no sequence at all, in the pack with the most room.
        taken_rows, taken_cost = np.append(self.rows[taken], 0), np.append(self.cost[taken], 0.0)
        taken_packs, given_packs = np.append(self.pack_of[taken], emptiest), self.pack_of[given]
        shift_GT = self.rows[given][:, None] - taken_rows
        gain_GT = self.cost[given][:, None] - taken_cost
        gap = costs[dear] - costs[cheap]
        allowed_GT = (gain_GT > 0) & (gain_GT < gap)
        allowed_GT &= pack_rows[taken_packs] + shift_GT <= self.capacity
        allowed_GT &= pack_rows[given_packs][:, None] - shift_GT <= self.capacity
        if not allowed_GT.any():
            return False
        distance_GT = np.where(allowed_GT, np.abs(gain_GT - gap / 2), np.inf)
        g, t = np.unravel_index(distance_GT.argmin(), distance_GT.shape)
        self.pack_of[given[g]] = taken_packs[t]
        if t < len(taken):
            self.pack_of[taken[t]] = given_packs[g]
        return True

    def _sequences(self, rank: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.rank_of[self.pack_of] == rank)[:_MAX_CANDIDATES]
