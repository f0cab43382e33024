"""Checksums of tensors, as evidence that two processes hold the same bytes. Any process; CPU and GPU.

    checksum = sum over rows r and columns c of (2 r + 1) x (2 c m + 1) x bits_rc   mod 2^64

with bits_rc an element's bytes as a signed integer and m an odd constant; a vector is one column, dimensions behind the
first are columns. Factors are odd, so a single changed element always changes the sum; elements that are swapped or
moved change it because their factors differ, those of a transposed matrix, too. The sum is additive: checksums of parts
whose rows and columns are numbered as in the whole add up to that of the whole (here each tensor begins at 0); zeros
behind its last row or column add nothing. It is not meant to resist an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_BLOCK = 1 << 20
"""Elements that are summed at once; bounds the memory of the sum."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, str] | None = None) -> dict[str, int]:
    """Returns the checksum of each tensor by name, in [-2^63, 2^63). One transfer from the device for all of them.

    Args:
        dtypes: names of the dtypes that tensors are rounded to first, by name; others stay as they are.
    """
    held = dtypes or {}
    sums = {name: _sum(each.to(getattr(torch, held[name])) if name in held else each) for name, each in tensors}
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}


def add_checksums(parts: Iterable[int]) -> int:
    """Returns the checksum of a tensor from those of its parts, in [-2^63, 2^63)."""
    return (sum(parts) + (1 << 63)) % (1 << 64) - (1 << 63)


def _sum(tensor: Tensor) -> Tensor:
    """Returns the checksum of a tensor as an int64 scalar, on its device."""
    matrix_RC = tensor.detach().reshape(tensor.shape or (1,))[:, None].flatten(1)
    bits_RC = matrix_RC.view(_BITS[tensor.element_size()])
    factors_C = torch.arange(bits_RC.shape[1], device=bits_RC.device).mul_(2).mul_(_MIX).add_(1)
    if bits_RC.device.type == "cpu":
        return torch.tensor(_sum_on_host(bits_RC.numpy(), factors_C.numpy()))
    return _sum_on_device(bits_RC, factors_C)


def _sum_on_device(bits_RC: Tensor, factors_C: Tensor) -> Tensor:
    num_rows, num_columns = bits_RC.shape
    factors_R = torch.arange(num_rows, device=bits_RC.device).mul_(2).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=bits_RC.device)
    step = max(1, _BLOCK // max(1, num_columns))
    for first in range(0, num_rows, step):
        sums_r = (bits_RC[first : first + step] * factors_C).sum(1)
        total += sums_r.mul_(factors_R[first : first + step]).sum()
    return total


@njit(cache=True, nogil=True)
def _sum_on_host(bits_RC: Any, factors_C: Any) -> Any:
    """Computes the sum in one pass: a weight of a small model takes longer to be widened to 64 bits than to be
    summed."""
    total = np.int64(0)
    for r in range(bits_RC.shape[0]):
        of_row = np.int64(0)
        for c in range(bits_RC.shape[1]):
            of_row += np.int64(bits_RC[r, c]) * factors_C[c]
        total += of_row * np.int64(2 * r + 1)
    return total
