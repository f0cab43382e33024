"""Division of sequences into packs and of packs among ranks, by their lengths and costs alone. Pure functions; any
process.

A plan is judged by three numbers, in this order: microbatches per rank (each costs a full round of communication),
the largest cost of a rank over the mean, and the cost of running in lockstep: microbatch i of every rank waits for the
slowest of them (expert parallelism over data-parallel ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.batching.balance import Division

Pack = list[int]
"""Indices of the sequences that share a microbatch, ascending."""


def plan_packs(
    sizes: Sequence[int], costs: Sequence[float], num_ranks: int, capacity: int, *, count_multiple: int = 1
) -> list[list[Pack]]:
    """Returns packs per rank, equally many on each, every sequence in exactly one.

    1. Best-fit decreasing says how many packs are needed; that number is rounded up to a multiple of the ranks, and
       per rank to one of `count_multiple`.
    2. That many packs are filled evenly in rows and cost (`fit`). If this leaves a sequence over, as it may with
       packs that are full to the brim, the best-fit packs stand, and ranks may get empty ones.
    3. Packs go to ranks in groups of similar cost (`deal`).
    4. Sequences are exchanged between the dearest rank and the cheap ones while that helps (`moerl.batching.balance`).

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


def _longest_first(rows: NDArray[Any]) -> list[int]:
    return np.argsort(-rows, kind="stable").tolist()
