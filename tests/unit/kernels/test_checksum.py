"""Checksums of tensors: equal bytes, equal sums; any changed, moved or swapped word, another sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moerl.kernels import checksum
from moerl.kernels.checksum import checksums


def checksum_of(tensor: Tensor) -> int:
    return checksums([("tensor", tensor)])["tensor"]


def by_definition(data: bytes) -> int:
    data += bytes(-len(data) % 4)
    total = 0
    for i in range(len(data) // 4):
        word = int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True)
        total += (2 * i + 1) * 0x9E3779B97F4A7C15 * word
    total %= 1 << 64
    return total - (1 << 64) if total >= 1 << 63 else total


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_is_what_its_definition_says(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(checksum, "_BLOCK", 3)
    tensor = torch.randn(shape).to(dtype)
    assert checksum_of(tensor) == by_definition(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def test_a_view_has_the_checksum_of_its_copy():
    whole = torch.randn(9, 8).bfloat16()
    for view in (whole[1:], whole[:, 3:], whole.T, whole[:, 1], whole.view(-1)[1:6]):
        assert checksum_of(view) == checksum_of(view.clone())


def test_every_single_bit_counts():
    tensor = torch.randn(6)
    sums = {checksum_of(tensor)}
    for index in range(6):
        for bit in range(32):
            other = tensor.clone()
            other.view(torch.int32)[index] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            sums.add(checksum_of(other))
    assert len(sums) == 1 + 6 * 32


def test_order_counts():
    rows = torch.randn(5, 4)
    assert checksum_of(rows.roll(1, 0)) != checksum_of(rows)
    assert checksum_of(rows[[1, 0, 2, 3, 4]]) != checksum_of(rows)


def test_of_no_tensors_there_are_no_checksums():
    assert checksums([]) == {}
