"""Checksums of tensors, as evidence that two processes hold the same bytes. Any process; CPU and GPU.

    checksum = sum over i of (2 i + 1) x m x bits_i   mod 2^64

with i the index of an element in the whole tensor (row by row), bits_i its bytes as a signed integer and m an odd
constant. Factors are odd, so a single changed element always changes the sum; elements that are swapped or moved change
it because their factors differ. The sum is additive: whatever parts a tensor is cut into, along rows, columns or both,
what the holders of the parts compute adds up to the checksum of the whole. It is not meant to resist an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_BLOCK = 1 << 20
"""Elements that are summed at once; bounds the memory of the sum."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """The checksum of each tensor by name, in [-2^63, 2^63). One transfer from the device for all of them."""
    names, sums = [], []
    for name, tensor in tensors:
        names.append(name)
        sums.append(_sum(tensor))
    return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if names else {}


def add_checksums(parts: Iterable[int]) -> int:
    """The checksum of a tensor from those of its parts, in [-2^63, 2^63)."""
    return (sum(parts) + (1 << 63)) % (1 << 64) - (1 << 63)


def _sum(tensor: Tensor) -> Tensor:
    """int64 scalar."""
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _BLOCK):
        block = bits[first : first + _BLOCK]
        factors = torch.arange(first, first + block.numel(), device=bits.device).mul_(2).add_(1).mul_(_MIX)
        total += factors.mul_(block).sum()
    return total
