"""Division of sequences into packs and among ranks, by length alone."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.buffer.partition import first_fit_decreasing, split_balanced, split_until

SIZES = st.lists(st.integers(1, 40), max_size=40)


def members(packs: list[list[int]]) -> list[int]:
    return sorted(index for pack in packs for index in pack)


def loads(packs: list[list[int]], sizes: list[int]) -> list[int]:
    return [sum(sizes[i] for i in pack) for pack in packs]


@settings(deadline=None)
@given(SIZES, st.integers(1, 60))
def test_first_fit_packs_everything_once_and_within_capacity(sizes: list[int], capacity: int):
    packs = first_fit_decreasing(sizes, capacity)
    assert members(packs) == list(range(len(sizes)))
    for pack, load in zip(packs, loads(packs, sizes), strict=True):
        assert load <= capacity or len(pack) == 1


@settings(deadline=None)
@given(SIZES)
def test_first_fit_leaves_no_two_packs_that_would_fit_together(sizes: list[int]):
    filled = sorted(loads(first_fit_decreasing(sizes, 50), sizes))
    assert all(first + second > 50 for first, second in pairwise(filled))


def test_first_fit_fills_packs_exactly_where_it_can():
    assert first_fit_decreasing([3, 7, 5, 5, 2, 8], 10) == [[4, 5], [0, 1], [2, 3]]


@settings(deadline=None)
@given(SIZES, st.integers(1, 8))
def test_balanced_parts_hold_everything_once_and_differ_by_one_sequence_at_most(sizes: list[int], num_parts: int):
    parts = split_balanced(sizes, num_parts)
    assert len(parts) == num_parts
    assert members(parts) == list(range(len(sizes)))
    filled = loads(parts, sizes)
    assert max(filled) - min(filled) <= max(sizes, default=0)


@settings(deadline=None)
@given(SIZES, st.integers(1, 80), st.integers(0, 50))
def test_splitting_gives_the_number_asked_for_and_loses_nothing(sizes: list[int], capacity: int, num_packs: int):
    packs = first_fit_decreasing(sizes, capacity)
    split = split_until(packs, sizes, num_packs)
    assert len(split) == max(num_packs, len(packs))
    assert members(split) == list(range(len(sizes)))
    assert max(loads(split, sizes), default=0) <= max(loads(packs, sizes), default=0)
    assert split.count([]) == max(0, len(split) - len(sizes)), "empty packs only once all sequences stand alone"


def test_the_largest_pack_is_split_into_nearly_equal_halves():
    sizes = [5, 4, 3, 2, 1]
    assert split_until([[0, 1, 2], [3, 4]], sizes, 3) == [[0], [3, 4], [1, 2]]
