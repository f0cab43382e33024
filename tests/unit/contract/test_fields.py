"""Joining and cutting kept sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.contract.trajectory import KeptSets

ROWS = st.lists(st.lists(st.integers(0, 99), unique=True, max_size=5).map(sorted), max_size=8)


def kept_sets(rows: list[list[int]]) -> KeptSets:
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return KeptSets(offsets, np.array([i for row in rows for i in row], np.int32))


def rows_of(kept: KeptSets) -> list[list[int]]:
    return [kept.ids[a:b].tolist() for a, b in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)]


@settings(deadline=None)
@given(st.lists(ROWS, max_size=4))
def test_concatenation_keeps_the_rows_in_order(parts: list[list[list[int]]]):
    joined = KeptSets.joined([kept_sets(rows) for rows in parts])
    assert rows_of(joined) == [row for rows in parts for row in rows]
    assert (joined.offsets.dtype, joined.ids.dtype) == (np.int64, np.int32)


@settings(deadline=None)
@given(ROWS, st.data())
def test_a_slice_holds_its_rows_and_starts_at_zero(rows: list[list[int]], data: st.DataObject):
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = kept_sets(rows).cut(start, stop)
    assert part.offsets[0] == 0
    assert rows_of(part) == rows[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (1, 0), (0, 3)])
def test_a_slice_outside_the_rows_is_an_error(start: int, stop: int):
    with pytest.raises(IndexError):
        kept_sets([[1], [2]]).cut(start, stop)
