"""Whether products on this machine are what the embedded engine takes them for."""

from __future__ import annotations

import pytest
import torch

from moerl.rollout.blocks import LEAST_READ, ROWS, TOKENS


def require_alike_products() -> None:
    """Skips where a product of whole blocks depends on how many there are: on no machine that was tried, with MKL."""
    if not _are_alike():
        pytest.skip("products of whole blocks depend on how many there are: another library or CPU than was tried")


def _are_alike() -> bool:
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    for width, num_outputs in ((24, 32), (32, 8), (32, 61), (48, 32)):
        rows, weight = some(16 * ROWS, width), some(num_outputs, width)
        whole = torch.nn.functional.linear(rows, weight)
        for count in range(ROWS, len(rows), ROWS):
            if not torch.equal(torch.nn.functional.linear(rows[:count], weight), whole[:count]):
                return False
    queries, keys = some(ROWS, 2, 2, 8), some(ROWS, 2, 8, LEAST_READ + 4 * TOKENS)
    whole = queries @ keys
    lengths = range(LEAST_READ, keys.shape[-1], TOKENS)
    return all(torch.equal(queries @ keys[..., :length], whole[..., :length]) for length in lengths)
