"""Matrix products that accumulate and return float32, and how many columns to compute at a time. Runs in trainer
processes."""

from __future__ import annotations

import torch
from torch import Tensor

SLAB_ELEMENTS = 2**21
"""Numbers in a slab of logits, or of rows of the head, of a small microbatch: 8 MiB in float32."""


def slab_columns(num_rows: int, width: int) -> int:
    """Columns per slab, for hidden states [num_rows, width]: a slab has `SLAB_ELEMENTS` numbers, or as many as the
    hidden states where those are more. Large products stay efficient, and extra memory is a few slabs."""
    return max(SLAB_ELEMENTS // max(num_rows, width, 1), min(num_rows, width), 1)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in float32 (float64 where one is float64), whatever the dtypes.

    On a GPU a product with a half-precision matrix runs in that precision and accumulates in float32, rounding a
    float32 factor first; elsewhere half precision is widened, which loses nothing.
    """
    half = next((x.dtype for x in (a, b) if x.dtype in (torch.bfloat16, torch.float16)), None)
    if half is not None and a.is_cuda:
        return torch.mm(a.to(half), b.to(half), out_dtype=torch.float32)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return a.to(wide) @ b.to(wide)
