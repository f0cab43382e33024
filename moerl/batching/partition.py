"""Division of sequences into packs and of packs among ranks, by their lengths and costs alone. Pure; any process.

A plan is judged by three numbers, in this order: microbatches per rank (each costs a full round of communication),
the largest cost of a rank over the mean, and the cost of running in lockstep: microbatch i of every rank waits for the
slowest of them (expert parallelism over data-parallel ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pack = list[int]
"""Indices of the sequences that share a microbatch, ascending."""

CLOSE_ENOUGH = 1.02
"""Largest cost of a rank over the mean at which the search stops."""

# Every exchange looks at all pairs of sequences of two ranks; both limits only bound the time of hopeless cases.
_MAX_EXCHANGES = 256
_MAX_CANDIDATES = 512
_MAX_PARTNERS = 4


def plan_packs(
    sizes: Sequence[int], costs: Sequence[float], num_ranks: int, capacity: int, *, count_multiple: int = 1
) -> list[list[Pack]]:
    """Returns packs per rank, equally many on each, every sequence in exactly one.

    1. Best-fit decreasing says how many packs are needed; that number is rounded up to a multiple of the ranks, and
       per rank to one of `count_multiple`.
    2. That many packs are filled evenly in rows and cost (`fit`). If this leaves a sequence over, as it may with
       packs that are full to the brim, the best-fit packs stand, and ranks may get empty ones.
    3. Packs go to ranks in groups of similar cost (`deal`).
    4. Sequences are exchanged between the dearest rank and the cheap ones while that helps (`Division`).

    Args:
        sizes: rows of each sequence, padding included. costs: of each sequence.
        capacity: most rows of a pack; a longer sequence has a pack of its own.

    Returns:
        Per rank, packs by falling cost; an empty pack is one without sequences. Deterministic.
    """
    if not len(sizes):
        return [[] for _ in range(num_ranks)]
    rows, cost = np.asarray(sizes, np.int64), np.asarray(costs, np.float64)
    tight = best_fit_decreasing(rows, capacity)
    unit = num_ranks * count_multiple
    num_packs = -(-(int(tight.max()) + 1) // unit) * unit
    pack_of = fit(rows, cost, num_packs, capacity)
    pack_of = tight if pack_of is None else pack_of
    rank_of = deal(np.bincount(pack_of, cost, num_packs), num_ranks)
    division = Division(rows, cost, pack_of, rank_of, capacity)
    division.improve()
    return [[np.flatnonzero(division.pack_of == pack).tolist() for pack in packs] for packs in division.by_rank()]


def best_fit_decreasing(rows: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Returns int64 [sequences]: the pack of each, from 0 without gaps, of at most `capacity` rows unless alone.

    Each sequence, longest first, goes to the fullest pack that holds it. At most 11/9 of the fewest packs possible,
    plus 4 (Johnson, Demers, Ullman, Garey and Graham, SIAM J. Computing 3, 1974). Equal ones go in order of index.
    """
    pack_of = np.zeros(len(rows), np.int64)
    room = np.full(len(rows), -1, np.int64)
    num_packs = 0
    for index in _longest_first(rows):
        left = room[:num_packs] - rows[index]
        fits = np.flatnonzero(left >= 0)
        if len(fits):
            chosen = int(fits[left[fits].argmin()])
        else:
            chosen, num_packs = num_packs, num_packs + 1
            room[chosen] = capacity
        pack_of[index] = chosen
        room[chosen] -= rows[index]
    return pack_of


def fit(rows: NDArray[np.int64], cost: NDArray[np.float64], num_packs: int, capacity: int) -> NDArray[np.int64] | None:
    """Returns int64 [sequences]: the pack of each; None if a sequence finds no room.

    Longest processing time first (Graham, SIAM J. Applied Mathematics 17, 1969) with two resources: each sequence,
    longest first, goes to the pack that holds it and whose rows and cost, each over its mean, are least in sum.
    """
    pack_of = np.zeros(len(rows), np.int64)
    pack_rows, load = np.zeros(num_packs, np.int64), np.zeros(num_packs)
    loads = rows / rows.sum() + cost / cost.sum()
    for index in _longest_first(rows):
        # An empty pack takes any sequence: one above the capacity has it alone.
        fits = (pack_rows + rows[index] <= capacity) | (pack_rows == 0)
        chosen = int(np.where(fits, load, np.inf).argmin())
        if not fits[chosen]:
            return None
        pack_of[index] = chosen
        pack_rows[chosen] += rows[index]
        load[chosen] += loads[index]
    return pack_of


def deal(pack_costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Returns int64 [packs]: the rank of each, equally many on each rank.

    Packs by falling cost are dealt in rounds of one per rank, within a round the dearest to the rank with the least so
    far. So the packs of a round, which run at the same time, cost nearly the same, and no two ranks end further apart
    than the widest round.
    """
    rank_of = np.zeros(len(pack_costs), np.int64)
    loads = np.zeros(num_ranks)
    for packs in np.argsort(-pack_costs, kind="stable").reshape(-1, num_ranks):
        ranks = np.argsort(loads, kind="stable")
        rank_of[packs] = ranks
        loads[ranks] += pack_costs[packs]
    return rank_of


def _longest_first(rows: NDArray[np.int64]) -> list[int]:
    return np.argsort(-rows, kind="stable").tolist()


@dataclass(slots=True)
class Division:
    """Sequences in packs, packs on ranks, and a local search for equal cost on all ranks. S = sequences, P = packs."""

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
