"""The order of the data as a function of seed and step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.batching.order import batch_indices, epoch_permutation
from moerl.errors import ConfigError


def epoch(num_items: int, batch_size: int, number: int, seed: int) -> list[int]:
    steps = num_items // batch_size
    return [
        index
        for step in range(number * steps, (number + 1) * steps)
        for index in batch_indices(num_items, batch_size, step, seed)
    ]


@settings(deadline=None)
@given(st.integers(1, 60), st.data(), st.integers(0, 3), st.integers(0, 2**63))
def test_no_item_comes_twice_in_an_epoch(num_items: int, data: st.DataObject, number: int, seed: int):
    batch_size = data.draw(st.integers(1, num_items))
    drawn = epoch(num_items, batch_size, number, seed)
    assert len(set(drawn)) == len(drawn) == num_items - num_items % batch_size
    assert set(drawn) <= set(range(num_items))


def test_an_epoch_of_whole_batches_covers_every_item():
    assert sorted(epoch(24, 8, 2, seed=1)) == list(range(24))


def test_items_left_over_in_one_epoch_come_in_another():
    seen = {index for number in range(20) for index in epoch(10, 4, number, seed=1)}
    assert seen == set(range(10))


def test_the_order_is_pinned_so_that_a_resumed_run_goes_on_with_the_same_data():
    assert batch_indices(8000, 4, 0, 1) == [7269, 7258, 1801, 1676]
    assert batch_indices(8000, 4, 5000, 1) == [4820, 1844, 4657, 2004]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_permutation(50, number, seed).tolist() for number in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_every_place_of_the_order_is_about_equally_likely():
    first = np.array([epoch_permutation(8, 0, seed)[0] for seed in range(4000)])
    counts = np.bincount(first, minlength=8)
    assert counts.min() > 400
    assert counts.max() < 600


@pytest.mark.parametrize(("num_items", "batch_size", "step"), [(4, 5, 0), (4, 0, 0), (0, 1, 0), (4, 2, -1)])
def test_a_batch_that_cannot_be_drawn_without_replacement_is_refused(num_items: int, batch_size: int, step: int):
    with pytest.raises(ConfigError, match="without replacement"):
        batch_indices(num_items, batch_size, step, 1)
