"""Estimated cost of sequences."""

from __future__ import annotations

import pytest

from moerl.buffer.cost import FlopSizes, SequenceCost, sequence_flops

SIZES = FlopSizes(hidden=4, layers=2, heads=2, key_value_heads=1, head_dim=3, ffn_width=10, vocab=7)


def by_hand(num_rows: int) -> float:
    """Two operations per multiply-add, matrix by matrix."""
    query = output = 4 * (2 * 3)
    key = value = 4 * (1 * 3)
    ffn = 3 * 4 * 10
    attention = sum(2 * 2 * 3 * (row + 1) for row in range(num_rows))
    return 2 * (num_rows * (2 * (query + output + key + value + ffn) + 4 * 7) + 2 * attention)


@pytest.mark.parametrize("num_rows", [1, 50, 4000])
def test_operations_agree_with_a_count_by_hand(num_rows: int):
    # The formula counts half a square, the loop the triangle with its diagonal.
    diagonal = 2 * 2 * 2 * 3 * num_rows
    assert sequence_flops(SIZES)(num_rows) == pytest.approx(by_hand(num_rows) - diagonal)


def test_without_a_model_rows_count():
    assert SequenceCost()(17) == 17.0
