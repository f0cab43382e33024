"""How sequences are divided into packs and among ranks, by their lengths alone. Pure functions; any
process."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Pack = list[int]
"""Indices of the sequences that share a microbatch, ascending."""


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[Pack]:
    """Packs of at most `capacity` each; a sequence longer than that has a pack of its own.

    First-fit decreasing (Johnson, 1973) needs at most 11/9 of the fewest packs possible, plus one.
    Deterministic: equal sizes go in order of their index.
    """
    packs: list[Pack] = []
    room = np.empty(len(sizes), np.int64)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = np.flatnonzero(room[: len(packs)] >= sizes[index])
        if len(fits):
            chosen = int(fits[0])
        else:
            chosen = len(packs)
            packs.append([])
            room[chosen] = capacity
        packs[chosen].append(index)
        room[chosen] -= sizes[index]
    return [sorted(pack) for pack in packs]


def split_balanced(sizes: Sequence[int], num_parts: int) -> list[Pack]:
    """`num_parts` lists of indices (some empty where there are too few) with nearly equal sums.

    Longest processing time first (Graham, 1969): the largest sum is at most 4/3 of the best possible.
    Deterministic.
    """
    parts: list[Pack] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, part = heapq.heappop(loads)
        parts[part].append(index)
        heapq.heappush(loads, (load + sizes[index], part))
    return [sorted(part) for part in parts]


def split_until(packs: Sequence[Pack], sizes: Sequence[int], num_packs: int) -> list[Pack]:
    """At least as many packs as `num_packs`, by halving the largest pack of two or more sequences again and
    again.

    Where nothing is left to halve the rest are empty packs.
    """
    result = [list(pack) for pack in packs]
    while len(result) < num_packs:
        divisible = [i for i, pack in enumerate(result) if len(pack) > 1]
        if not divisible:
            return result + [[] for _ in range(num_packs - len(result))]
        largest = max(divisible, key=lambda i: (sum(sizes[j] for j in result[i]), -i))
        pack = result[largest]
        halves = split_balanced([sizes[i] for i in pack], 2)
        result[largest] = [pack[i] for i in halves[0]]
        result.append([pack[i] for i in halves[1]])
    return result
