"""Listed pairs as the kernels of a GPU read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moerl.kernels import device_pairs
from moerl.kernels.device_pairs import LEFT_ALONE, DevicePairs, Sums
from moerl.kernels.head import VocabShard
from moerl.kernels.pairs import SortedPairs
from moerl.kernels.transfer import transfer

VOCAB, WIDTH = 23, 8
SHARD = VocabShard.from_group(VOCAB, VOCAB + 2, None)


def planned(listed: list[list[int]], advantage: float, longest: int) -> tuple[DevicePairs, NDArray[np.int64]]:
    """Pairs, and the rows and ids of what is listed, [N, 2]."""
    pairs_N2 = np.array([(row, token) for row, ids in enumerate(listed) for token in ids], np.int64).reshape(-1, 2)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(device_pairs, "DENSE_ADVANTAGE", advantage)
        patches.setattr(device_pairs, "LONGEST", longest)
        sorted_pairs = SortedPairs.of(pairs_N2[:, 0], pairs_N2[:, 1], SHARD)
        arrays = device_pairs.device_arrays(sorted_pairs, len(listed), SHARD.num_columns, WIDTH)
    return device_pairs.device_pairs(transfer(arrays, torch.device("cpu")), len(pairs_N2)), pairs_N2


def visits(sums: Sums, longest: int) -> dict[int, list[tuple[int, int]]]:
    """By segment that is written: the place and source of each of its pairs, in the order in which they are added."""
    pairs = list(zip(sums.positions_P.tolist(), sums.sources_P.tolist(), strict=True))
    found: dict[int, list[tuple[int, int]]] = {}
    for segment, (start, count) in enumerate(zip(sums.starts_S.tolist(), sums.counts_S.tolist(), strict=True)):
        assert count <= longest
        if count != LEFT_ALONE:
            found[segment] = pairs[start : start + count]
    for number, segment in enumerate(sums.split_L.tolist()):
        assert segment not in found
        found[segment] = []
        for part in range(*sums.first_parts_L1[number : number + 2].tolist()):
            start, count = int(sums.part_starts_C[part]), int(sums.part_counts_C[part])
            assert 0 < count <= longest
            found[segment] += pairs[start : start + count]
    return found


lists = st.lists(st.lists(st.integers(0, VOCAB - 1), unique=True).map(sorted), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(lists, st.sampled_from([0.001, 3.0, 1000.0]), st.sampled_from([1, 3, 1000]))
def test_every_pair_is_added_once_to_its_row_and_to_its_id(
    listed: list[list[int]], advantage: float, longest: int
) -> None:
    pairs, pairs_N2 = planned(listed, advantage, longest)
    common = {
        (int(position), int(slab.columns_U[cell % len(slab.columns_U)]), int(cell // len(slab.columns_U)))
        for slab in pairs.common
        for position, cell in zip(slab.positions_Q.tolist(), slab.cells_Q.tolist(), strict=True)
    }
    by_row, by_column = visits(pairs.by_row, longest), visits(pairs.by_column, longest)
    assert sorted(by_row) == list(range(len(listed)))
    common_ids = {column for _, column, _ in common}
    assert sorted(by_column) == [column for column in range(SHARD.num_columns) if column not in common_ids]
    expected = [(place, token, row) for place, (row, token) in enumerate(pairs_N2.tolist())]
    from_rows = [(place, token, row) for row, own in by_row.items() for place, token in own]
    from_columns = [(place, token, row) for token, own in by_column.items() for place, row in own]
    assert sorted([*from_rows, *common]) == expected
    assert sorted([*from_columns, *common]) == expected
    assert pairs.writes_all == (not common)
    for own in (*by_row.values(), *by_column.values()):
        assert own == sorted(own)


def test_an_id_that_all_rows_list_is_split_if_it_is_summed_pair_by_pair() -> None:
    pairs, _ = planned([[5]] * 100, advantage=0.001, longest=16)
    assert pairs.by_column.split_L.tolist() == [5]
    assert pairs.by_column.part_counts_C.tolist() == [16] * 6 + [4]
    assert not pairs.common


def test_ids_of_many_rows_become_columns_of_a_product() -> None:
    pairs, _ = planned([[5, row] for row in range(6, 16)], advantage=2.0, longest=16)
    assert [slab.columns_U.tolist() for slab in pairs.common] == [[5]]
    assert sorted(pairs.columns_P.tolist()) == list(range(6, 16))


def test_ids_of_other_shards_are_left_to_them() -> None:
    rows_N, ids_N = np.array([0, 0, 1, 1]), np.array([2, 9, 2, 30])
    shard = VocabShard(8, 16, 31, group=object())  # type: ignore[arg-type]
    arrays = device_pairs.device_arrays(SortedPairs.of(rows_N, ids_N, shard), 2, 8, WIDTH)
    pairs = device_pairs.device_pairs(transfer(arrays, torch.device("cpu")), 4)
    assert not pairs.writes_all
    everything = [*pairs.columns_P.tolist(), *[c for slab in pairs.common for c in slab.columns_U.tolist()]]
    assert everything == [1]
