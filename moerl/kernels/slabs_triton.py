"""Triton kernels over a slab of logits: sums per row, and gradients of the logits. Runs in trainer processes on GPUs.

Each row of a slab has one program, which reads it twice forward and once backward, so that results have the same bits
every time. Microbatches differ in their rows: a kernel is compiled anew only for columns that 16 does not divide,
which the last slab can have. Shape legend: `moerl/kernels/__init__.py`.
"""

# Triton infers the types of a kernel's arguments.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 1024
"""Columns that a program reads at a time."""


@triton.jit(do_not_specialize=["num_rows"])
def add_kernel(
    z_ptr, temperatures_ptr, targets_ptr, state_ptr, first, num_rows, num_columns, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds a slab of logits to `state` [4, R]: maximum, `sum e`, `sum e (x - max)` and the target's x."""
    row = tl.program_id(0)
    at_state = state_ptr + row
    temperature = tl.load(temperatures_ptr + row)
    own = z_ptr + row.to(tl.int64) * num_columns
    old_max = tl.load(at_state)
    largest = old_max
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < num_columns, other=float("-inf")) / temperature
        largest = tl.maximum(largest, tl.max(x, axis=0))
    moved = tl.where(old_max == float("-inf"), 0.0, old_max - largest)
    total, weighted = tl.load(at_state + num_rows), tl.load(at_state + 2 * num_rows)
    weighted = (weighted + moved * total) * tl.exp(moved)
    total = total * tl.exp(moved)
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_columns
        x = tl.load(own + at, mask=inside, other=0.0) / temperature - largest
        e = tl.where(inside, tl.exp(x), 0.0)
        total += tl.sum(e, axis=0)
        weighted += tl.sum(e * tl.where(inside, x, 0.0), axis=0)
    tl.store(at_state, largest)
    tl.store(at_state + num_rows, total)
    tl.store(at_state + 2 * num_rows, weighted)
    target = tl.load(targets_ptr + row) - first
    if (target >= 0) & (target < num_columns):
        tl.store(at_state + 3 * num_rows, tl.load(own + target) / temperature)


@triton.jit
def gradient_kernel(
    z_ptr, temperatures_ptr, targets_ptr, log_sums_ptr, entropy_ptr, of_logprobs_ptr, of_entropy_ptr, out_ptr,
    first, num_columns, BLOCK: tl.constexpr, OF_LOGPROBS: tl.constexpr, OF_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of a slab of logits: `onehot - p` of a log-prob, `-p (log p + entropy)` of an entropy, over
    the temperature.

    The difference is taken before it is rounded: in bfloat16 `1 - p` of a likely target would be lost.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    log_sum = tl.load(log_sums_ptr + row)
    target = tl.load(targets_ptr + row) - first
    own, out = z_ptr + row.to(tl.int64) * num_columns, out_ptr + row.to(tl.int64) * num_columns
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_columns
        logprobs = tl.where(inside, tl.load(own + at, mask=inside, other=0.0) / temperature - log_sum, 0.0)
        p = tl.exp(logprobs)
        grad = tl.zeros((BLOCK,), dtype=z_ptr.dtype.element_ty)
        if OF_LOGPROBS:
            grad += tl.load(of_logprobs_ptr + row) * (tl.where(at == target, 1.0, 0.0) - p)
        if OF_ENTROPY:
            grad -= tl.load(of_entropy_ptr + row) * p * (logprobs + tl.load(entropy_ptr + row))
        tl.store(out + at, (grad / temperature).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_kl_kernel(
    z_ptr, other_ptr, temperatures_ptr, state_ptr, num_rows, num_columns, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds slabs of logits of two models to `state` [5, R]: maximum, `sum e` and `sum e (x - y)` of the first one,
    maximum and `sum e` of the second."""
    row = tl.program_id(0)
    at_state = state_ptr + row
    temperature = tl.load(temperatures_ptr + row)
    own, other = z_ptr + row.to(tl.int64) * num_columns, other_ptr + row.to(tl.int64) * num_columns
    old_x, old_y = tl.load(at_state), tl.load(at_state + 3 * num_rows)
    largest_x, largest_y = old_x, old_y
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < num_columns, other=float("-inf")) / temperature
        y = tl.load(other + at, mask=at < num_columns, other=float("-inf")) / temperature
        largest_x, largest_y = tl.maximum(largest_x, tl.max(x, axis=0)), tl.maximum(largest_y, tl.max(y, axis=0))
    moved_x = tl.exp(tl.where(old_x == float("-inf"), 0.0, old_x - largest_x))
    moved_y = tl.exp(tl.where(old_y == float("-inf"), 0.0, old_y - largest_y))
    total_x, total_y = tl.load(at_state + num_rows) * moved_x, tl.load(at_state + 4 * num_rows) * moved_y
    weighted = tl.load(at_state + 2 * num_rows) * moved_x
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_columns
        x = tl.load(own + at, mask=inside, other=0.0) / temperature
        y = tl.load(other + at, mask=inside, other=0.0) / temperature
        e = tl.where(inside, tl.exp(x - largest_x), 0.0)
        total_x += tl.sum(e, axis=0)
        weighted += tl.sum(e * (x - y), axis=0)
        total_y += tl.sum(tl.where(inside, tl.exp(y - largest_y), 0.0), axis=0)
    tl.store(at_state, largest_x)
    tl.store(at_state + num_rows, total_x)
    tl.store(at_state + 2 * num_rows, weighted)
    tl.store(at_state + 3 * num_rows, largest_y)
    tl.store(at_state + 4 * num_rows, total_y)


@triton.jit
def kl_gradient_kernel(
    z_ptr, other_ptr, temperatures_ptr, log_sums_ptr, mean_gaps_ptr, of_kl_ptr, out_ptr, num_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of a slab of logits: `p (x - y - E[x - y])`, over the temperature."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    log_sum, mean_gap = tl.load(log_sums_ptr + row), tl.load(mean_gaps_ptr + row)
    scale = tl.load(of_kl_ptr + row) / temperature
    place = row.to(tl.int64) * num_columns
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_columns
        x = tl.load(z_ptr + place + at, mask=inside, other=0.0) / temperature
        y = tl.load(other_ptr + place + at, mask=inside, other=0.0) / temperature
        grad = tl.exp(tl.where(inside, x - log_sum, 0.0)) * (x - y - mean_gap) * scale
        tl.store(out_ptr + place + at, grad.to(out_ptr.dtype.element_ty), mask=inside)


def empty_state(temperatures_R: Tensor, maxima: tuple[int, ...], size: int) -> Tensor:
    """Returns the state [size, R] before any column: zeros, and -inf in the rows `maxima`."""
    state = temperatures_R.new_zeros(size, len(temperatures_R))
    for row in maxima:
        state[row].fill_(float("-inf"))
    return state


def add(z_RC: Tensor, temperatures_R: Tensor, targets_R: Tensor, state_4R: Tensor, first: int) -> None:
    """Adds a slab that begins at column `first` to the state. targets_R: int64, local columns; a target outside of the
    slab changes nothing."""
    add_kernel[(len(z_RC),)](z_RC, temperatures_R, targets_R, state_4R, first, len(z_RC), z_RC.shape[1], **_fixed())


def gradient(
    z_RC: Tensor,
    rows: tuple[Tensor, Tensor],
    scored: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient of a slab of logits that begins at column `first`: [R, C] of `dtype`.

    rows: temperatures, and local columns of targets. scored: `log sum exp` and entropies. grads: of log-probs and
    entropies.
    """
    out_RC = torch.empty_like(z_RC, dtype=dtype)
    # A pointer that is not read, if there is no gradient.
    of_logprobs_R, of_entropy_R = (scored[0] if each is None else each.contiguous() for each in grads)
    gradient_kernel[(len(z_RC),)](
        z_RC, *rows, *scored, of_logprobs_R, of_entropy_R, out_RC, first, z_RC.shape[1],
        **_fixed(OF_LOGPROBS=grads[0] is not None, OF_ENTROPY=grads[1] is not None),
    )  # fmt: skip
    return out_RC


def add_kl(z_RC: Tensor, other_RC: Tensor, temperatures_R: Tensor, state_5R: Tensor) -> None:
    """Adds a slab of logits of each model to the state."""
    add_kl_kernel[(len(z_RC),)](z_RC, other_RC, temperatures_R, state_5R, len(z_RC), z_RC.shape[1], **_fixed())


def kl_gradient(
    z_RC: Tensor, other_RC: Tensor, per_row: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns the gradient of a slab of logits, [R, C] of `dtype`.

    per_row: temperatures, `log sum exp`, expected difference of the logits, gradient of the KL.
    """
    out_RC = torch.empty_like(z_RC, dtype=dtype)
    kl_gradient_kernel[(len(z_RC),)](z_RC, other_RC, *per_row, out_RC, z_RC.shape[1], **_fixed())
    return out_RC


def _fixed(**more: bool) -> dict[str, Any]:
    """Returns the constants that a kernel is compiled for."""
    return {"BLOCK": BLOCK_COLUMNS, **more}
