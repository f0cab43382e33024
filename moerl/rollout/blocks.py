"""Whole blocks: what a sequence of the embedded engine samples on a CPU does not depend on its batchmates, bit for bit.

Libraries add up the terms of a product in an order that depends on how many rows there are, and those of a sum in one
that depends on its width. So rows are filled up to whole blocks of `ROWS`, and tokens that are attended to, to whole
blocks of `TOKENS`. A run that was resumed while part of a step's groups were sampled, and asks again for the others
only, is the run that it would have been.
"""

from __future__ import annotations

ROWS = 4
"""From here on MKL's products of float32 take the rows of a block together, with one thread as with several."""

TOKENS = 16
"""The numbers of float32 in the widest vector of a CPU."""

LEAST_READ = 64
"""Tokens that a decoding step reads at least: torch multiplies matrices of less than 400 products by itself."""


def whole_blocks(count: int, block: int) -> int:
    """The least multiple of `block` that is not below `count`."""
    return -(-count // block) * block
