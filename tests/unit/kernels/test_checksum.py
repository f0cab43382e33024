"""Checksums of tensors: equal bytes, equal sums; any changed, moved or swapped element, another sum; parts add up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moerl.kernels import checksum
from moerl.kernels.checksum import add_checksums, checksums


def checksum_of(tensor: Tensor) -> int:
    return checksums([("tensor", tensor)])["tensor"]


def by_definition(tensor: Tensor, first_row: int = 0, first_column: int = 0) -> int:
    """Computes the checksum of a vector, or of a part of a matrix, by its definition."""
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    total = 0
    for r, row in enumerate(bits[:, None].flatten(1).tolist(), first_row):
        for c, value in enumerate(row, first_column):
            total += (2 * r + 1) * (2 * c * 0x9E3779B97F4A7C15 + 1) * value
    return as_signed(total)


def as_signed(total: int) -> int:
    total %= 1 << 64
    return total - (1 << 64) if total >= 1 << 63 else total


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("where", ["on the host", "on a device"])
def test_a_checksum_is_what_its_definition_says(
    shape: tuple[int, ...], dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checksum, "_BLOCK", 3)
    if where == "on a device":
        # torch computes it there; the host has what torch and numpy share.
        monkeypatch.setattr(checksum, "_sum_on_host", _as_on_a_device)
    tensor = torch.randn(shape).to(dtype)
    assert checksum_of(tensor) == by_definition(tensor)


def _as_on_a_device(bits: NDArray[Any], factors: NDArray[Any]) -> int:
    return int(checksum._sum_on_device(torch.from_numpy(bits), torch.from_numpy(factors)))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.integers(0, 7), max_size=3).map(sorted),
    st.lists(st.integers(0, 9), max_size=3).map(sorted),
)
def test_whatever_a_tensor_is_cut_into_the_parts_add_up(num_rows, num_columns, dtype, row_cuts, column_cuts):
    whole = torch.randn(num_rows, num_columns).to(dtype)
    parts = [
        by_definition(whole[r0:r1, c0:c1], r0, c0)
        for r0, r1 in pairwise([0, *(min(cut, num_rows) for cut in row_cuts), num_rows])
        for c0, c1 in pairwise([0, *(min(cut, num_columns) for cut in column_cuts), num_columns])
    ]
    assert add_checksums(parts) == checksum_of(whole)


def test_a_view_has_the_checksum_of_its_copy():
    whole = torch.randn(9, 8).bfloat16()
    for view in (whole[1:], whole[:, 3:], whole.T, whole[:, 1], whole.view(-1)[1:6]):
        assert checksum_of(view) == checksum_of(view.clone())


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_every_single_bit_counts(dtype: torch.dtype, bits: torch.dtype):
    tensor = torch.randn(6).to(dtype)
    num_bits = 8 * tensor.element_size()
    sums = {checksum_of(tensor)}
    for index in range(6):
        for bit in range(num_bits):
            other = tensor.clone()
            other.view(bits)[index] ^= torch.tensor(1 << bit, dtype=torch.int64).to(bits)
            sums.add(checksum_of(other))
    assert len(sums) == 1 + 6 * num_bits


def test_order_counts():
    rows = torch.randn(5, 4)
    assert checksum_of(rows.roll(1, 0)) != checksum_of(rows)
    assert checksum_of(rows[[1, 0, 2, 3, 4]]) != checksum_of(rows)


def test_a_transposed_matrix_has_another_checksum():
    matrix = torch.randn(5, 5)
    assert checksum_of(matrix.T) != checksum_of(matrix)


def test_zeros_behind_the_last_row_and_column_add_nothing():
    matrix = torch.randn(4, 6).bfloat16()
    assert checksum_of(torch.nn.functional.pad(matrix, (0, 3, 0, 2))) == checksum_of(matrix)


def test_scalars_and_empty_tensors_have_checksums_too():
    assert checksum_of(torch.tensor(1.5)) == checksum_of(torch.tensor([1.5])) != 0
    assert checksum_of(torch.empty(0, 3)) == checksum_of(torch.empty(0)) == 0


def test_of_no_tensors_there_are_no_checksums():
    assert checksums([]) == {}
