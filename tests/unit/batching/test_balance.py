"""Exchanges of sequences between ranks: cheaper at the top, never over the capacity."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.batching.partition import CLOSE_ENOUGH, Division


def division(rows: list[int], pack_of: list[int], rank_of: list[int], capacity: int) -> Division:
    arrays = np.array(rows, np.int64), np.array(rows, float) ** 2
    return Division(*arrays, np.array(pack_of), np.array(rank_of), capacity)


def pack_rows(divided: Division) -> list[int]:
    return np.bincount(divided.pack_of, divided.rows, len(divided.rank_of)).astype(int).tolist()


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=30), st.data())
def test_improving_lowers_the_dearest_rank_within_the_capacity(
    num_ranks: int, num_packs: int, rows: list[int], data: st.DataObject
):
    packs = st.integers(0, num_ranks * num_packs - 1)
    pack_of = data.draw(st.lists(packs, min_size=len(rows), max_size=len(rows)))
    rank_of = [pack % num_ranks for pack in range(num_ranks * num_packs)]
    divided = division(rows, pack_of, rank_of, 0)
    before = pack_rows(divided)
    divided.capacity = max(before)
    dearest = divided.rank_costs.max()
    divided.improve()
    assert divided.rank_costs.max() <= dearest
    assert max(pack_rows(divided)) <= divided.capacity
    assert sum(pack_rows(divided)) == sum(rows)


def test_a_sequence_changes_places_with_a_cheaper_one():
    divided = division([9, 9, 1, 1], [0, 0, 1, 1], [0, 1], 18)
    divided.improve()
    assert divided.rank_costs.tolist() == [82.0, 82.0]


def test_a_sequence_moves_to_where_there_is_room():
    divided = division([5, 5, 5, 5], [0, 0, 0, 0], [0, 1], 20)
    divided.improve()
    assert sorted(pack_rows(divided)) == [10, 10]


def test_no_exchange_overfills_either_pack():
    # Rank 0 costs ten times as much, but 6 fits neither beside 7 and 5 nor in place of 5, and 7 not in place of 6.
    rows, cost = np.array([6, 6, 7, 5], np.int64), np.array([10.0, 10.0, 1.0, 1.0])
    divided = Division(rows, cost, np.array([0, 0, 1, 1]), np.array([0, 1]), 12)
    divided.improve()
    assert divided.pack_of.tolist() == [0, 0, 1, 1]


def test_ranks_close_enough_are_left_alone():
    divided = division([100, 99], [0, 1], [0, 1], 200)
    assert divided.rank_costs.max() <= CLOSE_ENOUGH * divided.rank_costs.mean()
    divided.improve()
    assert divided.pack_of.tolist() == [0, 1]


def test_packs_of_a_rank_are_ordered_by_falling_cost():
    divided = division([1, 5, 3, 2], [0, 1, 2, 3], [0, 1, 0, 1], 10)
    assert divided.by_rank() == [[2, 0], [1, 3]]
