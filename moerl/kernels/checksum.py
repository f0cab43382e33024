"""Checksums of tensors, as evidence that two processes hold the same bytes. Any process; CPU and GPU.

    checksum = sum over i of (2 i + 1) x m x word_i   mod 2^64

with word_i the 32-bit words of the tensor's bytes in memory order (a last one is filled up with zeros) and m an odd
constant. Factors are odd, so a single changed word always changes the sum; words that are swapped or moved change it
because their factors differ. It is not meant to resist an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_BLOCK = 1 << 20
"""Words that are summed at once; bounds the memory of the sum."""


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """The checksum of each tensor by name, in [-2^63, 2^63). One transfer from the device for all of them."""
    names, sums = [], []
    for name, tensor in tensors:
        names.append(name)
        sums.append(_sum(tensor))
    return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if names else {}


def _sum(tensor: Tensor) -> Tensor:
    """int64 scalar."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, words.numel(), _BLOCK):
        block = words[first : first + _BLOCK].long()
        factors = torch.arange(first, first + block.numel(), device=words.device).mul_(2).add_(1).mul_(_MIX)
        total += block.mul_(factors).sum()
    return total
