"""Operations of any model on a CPU in float32, with rows that do not depend on one another, bit for bit.

Runs inside the embedded rollout engine. Libraries choose the order in which they add up the terms of a product by the
number of rows: on some CPUs a row of 96 numbers gives other bits among 4 rows than among 8. What is sampled for a
request would depend on what is sampled with it, and a run that was resumed in mid-step, and asks again for the groups
that are missing, would not be the run that it was. So products, attention and the functions that vectors approximate
are kernels here (`moerl.rollout.layer_kernels`).

Shape legend: R = rows, I, O = numbers in and out, E = experts, N = sequences, H = query heads, G = key-value heads, Q =
query tokens, C = tokens that there is room for, D = head size, V = size of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, override

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moerl.kernels.host import by_rows
from moerl.rollout import layer_kernels as kernels
from moerl.rollout.blocks import ROWS, whole_blocks

_FEW_TERMS = 2**20
"""Not worth another thread."""


def is_for_kernels(tensor: Tensor) -> bool:
    """Returns whether a tensor is float32, on a CPU."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def linear(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Computes `torch.nn.functional.linear` of float32 [..., I]."""
    num_out, num_in = weight_OI.shape
    rows = inputs.reshape(-1, num_in)
    num_rows = len(rows)
    if missing := whole_blocks(num_rows) - num_rows:
        rows = nn.functional.pad(rows, (0, 0, 0, missing))
    out = rows.new_empty(len(rows), num_out)
    given, weight, made = _shared(rows), _shared(weight_OI), out.numpy()

    def run(start: int, stop: int) -> None:
        kernels.project(given, weight, made, ROWS * start, ROWS * stop, False)

    by_rows(len(rows) // ROWS, run, few=-(-_FEW_TERMS // (ROWS * num_in * num_out)))
    out = out[:num_rows].view(*inputs.shape[:-1], num_out)
    return out if bias_O is None else out + bias_O


def grouped(rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies rows that are sorted by expert with the weights of their experts: float32 [R, O].

    Args:
        ends_E: int, end of the rows of each expert; whole blocks of `ROWS` each.
    """
    out = rows_RI.new_empty(len(rows_RI), weight_EOI.shape[1])
    given, weight, made, start = _shared(rows_RI), _shared(weight_EOI), out.numpy(), 0
    for expert, stop in enumerate(ends_E.tolist()):
        if start < stop:
            kernels.project(given, weight[expert], made, start, stop, False)
        start = stop
    return out


def attention(query_NHQD: Tensor, key_NGCD: Tensor, value_NGCV: Tensor, seen_NQ: Tensor, scale: float) -> Tensor:
    """Attends to the first tokens, softmax(q k^T * scale) v: float32 [N, Q, H, V].

    Args:
        seen_NQ: int64, how many tokens each query sees, at least 1.
    """
    num_rows, num_heads, num_queries, _ = query_NHQD.shape
    out = query_NHQD.new_empty(num_rows, num_queries, num_heads, value_NGCV.shape[-1])
    given = tuple(_shared(each) for each in (query_NHQD, key_NGCD, value_NGCV))
    seen, made = seen_NQ.contiguous().numpy(), out.numpy()
    terms = num_heads * query_NHQD.shape[-1] * int(seen_NQ.max()) * num_queries

    def run(start: int, stop: int) -> None:
        kernels.attend_each(given, seen, np.float32(scale), made, start, stop)

    by_rows(num_rows, run, few=-(-_FEW_TERMS // terms))
    return out


def of_each(kernel: Callable[..., None], inputs: Tensor) -> Tensor:
    """Applies a function of single numbers to float32 [..., I].

    Libraries compute those that fill no vector at the end of a tensor in another way than the others.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    given, made = _shared(rows), out.numpy()
    few = -(-_FEW_TERMS // (64 * rows.shape[1]))
    by_rows(len(rows), lambda start, stop: kernel(given, made, start, stop), few=few)
    return out.view(inputs.shape)


_OF_EACH: dict[Any, Callable[..., None]] = {
    torch.nn.functional.silu: kernels.silu,
    torch.Tensor.sigmoid: kernels.sigmoid,
    torch.sigmoid: kernels.sigmoid,
    torch.Tensor.cos: kernels.cosine,
    torch.cos: kernels.cosine,
    torch.Tensor.sin: kernels.sine,
    torch.sin: kernels.sine,
}


class IndependentRows(TorchFunctionMode):
    """A mode, in which what a model computes on a CPU in float32 goes through the functions above."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and is_for_kernels(args[0]):
            return linear(*args, **(kwargs or {}))
        if (kernel := _OF_EACH.get(func)) is not None and is_for_kernels(args[0]):
            return of_each(kernel, args[0])
        return func(*args, **(kwargs or {}))


def _shared(tensor: Tensor) -> Any:
    """Returns the memory of a tensor, or of a copy of it if its rows do not follow one another."""
    return tensor.detach().contiguous().numpy()
