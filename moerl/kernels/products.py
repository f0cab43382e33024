"""Matrix products in the precision of scores, the number of columns to compute at a time, and the devices that run
kernels.

Runs in trainer processes. Factors of half precision are multiplied as they are on a GPU, and widened on a CPU, which
loses nothing; sums are float32 either way. float32 factors have full products, unless the process lets torch use TF32;
float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SLAB_ELEMENTS = 2**21
"""Numbers in a slab of logits, or in a slab of rows of the head, of a small microbatch: 8 MiB in float32."""
SLAB_MULTIPLE = 64
"""Columns of a slab are a multiple of it, so that its rows begin at addresses that Hopper's fast products can read."""
_HALF = (torch.bfloat16, torch.float16)


def on_device(device: torch.device) -> bool:
    """Returns True if the Triton kernels compute for tensors of `device`."""
    return device.type == "cuda"


def slab_columns(num_rows: int, width: int) -> int:
    """Returns the columns per slab, for hidden states [num_rows, width]: a slab has `SLAB_ELEMENTS` numbers, or as many
    as the hidden states if those are more. Large products stay efficient, and extra memory is a few slabs. More columns
    than `SLAB_MULTIPLE` are rounded down to a multiple of it."""
    columns = max(SLAB_ELEMENTS // max(num_rows, width, 1), min(num_rows, width), 1)
    return columns - columns % SLAB_MULTIPLE if columns > SLAB_MULTIPLE else columns


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b` in float32 (float64 if one is float64); both of one dtype on a GPU."""
    if a.is_cuda and a.dtype in _HALF:
        with _float32_sums():
            return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return a.to(wide) @ b.to(wide)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds `a @ b` to `out`, which has the dtype of sums, in one kernel for half precision on a GPU."""
    if a.is_cuda and a.dtype in _HALF:
        # The only one of torch's products that add to float32 from half precision that is the same since 2.11.
        with _float32_sums():
            torch.baddbmm(out[None], a[None], b[None], out_dtype=torch.float32, out=out[None])
    else:
        out += matmul(a, b)


def write_product(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """Writes `a @ b` to `out`, or adds it if `add`. `out` has any dtype: summed as in `matmul`, then rounded once."""
    if a.is_cuda and a.dtype == out.dtype:
        with _float32_sums():
            torch.addmm(out, a, b, beta=1 if add else 0, out=out)
    elif add and out.dtype == torch.float32:
        add_product(out, a, b)
    elif add:
        out += matmul(a, b)
    else:
        out.copy_(matmul(a, b))


@contextmanager
def _float32_sums() -> Iterator[None]:
    """Keeps the library from adding parts of a long product in half precision."""
    settings = torch.backends.cuda.matmul
    # Each is a pair: may parts be added in half precision, and may a long product be split.
    bf16 = settings.allow_bf16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction_split_k
    fp16 = settings.allow_fp16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction_split_k
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = bf16
        settings.allow_fp16_reduced_precision_reduction = fp16
