"""Whole blocks of rows: what the compiled kernels of the embedded engine multiply at a time. Torch-free."""

from __future__ import annotations

ROWS = 4
"""Rows that a product takes together."""


def whole_blocks(count: int) -> int:
    """Returns the least multiple of `ROWS` that is not below `count`."""
    return -(-count // ROWS) * ROWS
