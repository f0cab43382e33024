"""Triton kernels over listed pairs and kept sets: dot products, log-softmax of each set, and gradients. Runs in trainer
processes on GPUs.

Reads each listed row of the head in place; nothing is gathered. Every number has one program that writes it, and every
sum a fixed order, so results have the same bits every time. Shape legend: `moerl/kernels/device_pairs.py`.
"""

# Triton infers the types of a kernel's arguments.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moerl.kernels.device_pairs import DevicePairs, Sums
from moerl.kernels.head import HeadInputs

DOT_WIDTH, DOT_PAIRS = 512, 8
"""Numbers of a hidden state, and pairs, that a program multiplies at a time."""
SUM_WIDTH, SUM_PAIRS = 2048, 4
"""Columns of a result that a program writes, and pairs that it reads at a time."""
SET_BLOCK: Any = 1024
"""Ids of a set that a program reads at a time."""


@triton.jit(do_not_specialize=["num_pairs"])
def dots_kernel(
    hidden_ptr, weight_ptr, rows_ptr, columns_ptr, positions_ptr, z_ptr, num_pairs, width,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Writes `z[position] = hidden[row] . weight[column]` of a few pairs."""
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = pairs < num_pairs
    hidden_rows = hidden_ptr + tl.load(rows_ptr + pairs, mask=real, other=0).to(tl.int64)[:, None] * width
    weight_rows = weight_ptr + tl.load(columns_ptr + pairs, mask=real, other=0).to(tl.int64)[:, None] * width
    total = tl.zeros((PAIRS, BLOCK), dtype=ACCUMULATE)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        inside = real[:, None] & (at < width)
        hidden = tl.load(hidden_rows + at, mask=inside, other=0.0).to(ACCUMULATE)
        total += hidden * tl.load(weight_rows + at, mask=inside, other=0.0).to(ACCUMULATE)
    tl.store(z_ptr + tl.load(positions_ptr + pairs, mask=real, other=0), tl.sum(total, axis=1), mask=real)


@triton.jit
def sums_kernel(
    source_ptr, factors_ptr, positions_ptr, sources_ptr, starts_ptr, counts_ptr, out_ptr, width,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, ACCUMULATE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Writes some columns of `out[s] = sum over the pairs of segment s of factors[position] * source[sources]`, or adds
    them: a segment without pairs is then left alone."""
    segment = tl.program_id(0)
    count = tl.load(counts_ptr + segment)
    if count >= (1 if ADD else 0):
        start = tl.load(starts_ptr + segment)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        total = tl.zeros((BLOCK,), dtype=ACCUMULATE)
        for first in range(0, count, PAIRS):
            pairs = first + tl.arange(0, PAIRS)
            real = pairs < count
            positions = tl.load(positions_ptr + start + pairs, mask=real, other=0)
            factors = tl.load(factors_ptr + positions, mask=real, other=0.0)
            rows = tl.load(sources_ptr + start + pairs, mask=real, other=0).to(tl.int64)
            values = tl.load(
                source_ptr + rows[:, None] * width + at[None, :], mask=real[:, None] & inside[None, :], other=0.0
            )
            total += tl.sum(factors[:, None].to(ACCUMULATE) * values.to(ACCUMULATE), axis=0)
        out = out_ptr + segment.to(tl.int64) * width + at
        if ADD:
            total += tl.load(out, mask=inside, other=0.0).to(ACCUMULATE)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def parts_kernel(
    parts_ptr, first_parts_ptr, split_ptr, out_ptr, width,
    BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Writes some columns of `out[split[l]] = sum of the parts of l`, or adds them."""
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), dtype=ACCUMULATE)
    first, stop = tl.load(first_parts_ptr + number), tl.load(first_parts_ptr + number + 1)
    part_ptr = parts_ptr + first.to(tl.int64) * width
    for _ in range(first, stop):
        total += tl.load(part_ptr + at, mask=inside, other=0.0)
        part_ptr += width
    out = out_ptr + tl.load(split_ptr + number).to(tl.int64) * width + at
    if ADD:
        total += tl.load(out, mask=inside, other=0.0).to(ACCUMULATE)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sets_kernel(
    z_ptr, temperatures_ptr, offsets_ptr, targets_ptr, logprobs_ptr, entropy_ptr, kept_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """Computes the log-softmax of the set of a row at `z / temperature`: of its target, of all ids, and the entropy.

    0 if the row has no target (-1): it is not scored, or lists nothing. Sums are float64.
    """
    row = tl.program_id(0)
    start, stop = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    target = tl.load(targets_ptr + row)
    if target < 0:
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        for first in range(start, stop, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(kept_ptr + at, tl.zeros((BLOCK,), dtype=kept_ptr.dtype.element_ty), mask=at < stop)
    else:
        temperature = tl.load(temperatures_ptr + row).to(z_ptr.dtype.element_ty)
        largest = tl.load(z_ptr + start) / temperature
        for first in range(start, stop, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(z_ptr + at, mask=at < stop, other=float("-inf")) / temperature
            largest = tl.maximum(largest, tl.max(x, axis=0))
        total = tl.sum(tl.zeros((BLOCK,), dtype=tl.float64), axis=0)
        weighted = total
        for first in range(start, stop, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < stop
            x = tl.load(z_ptr + at, mask=inside, other=0.0) / temperature - largest
            e = tl.where(inside, tl.exp(x), 0.0)
            total += tl.sum(e.to(tl.float64), axis=0)
            weighted += tl.sum((e * tl.where(inside, x, 0.0)).to(tl.float64), axis=0)
        log_total = tl.log(total)
        shift = log_total.to(z_ptr.dtype.element_ty)
        for first in range(start, stop, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(z_ptr + at, mask=at < stop, other=0.0) / temperature - largest
            tl.store(kept_ptr + at, x - shift, mask=at < stop)
        tl.store(logprobs_ptr + row, tl.load(z_ptr + target) / temperature - largest - shift)
        tl.store(entropy_ptr + row, log_total - weighted / total)


@triton.jit
def sets_gradient_kernel(
    kept_ptr, entropy_ptr, temperatures_ptr, offsets_ptr, targets_ptr,
    of_logprobs_ptr, of_entropy_ptr, of_kept_ptr, grad_ptr,
    BLOCK: tl.constexpr, OF_LOGPROBS: tl.constexpr, OF_ENTROPY: tl.constexpr, OF_KEPT: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of `z` of a row from those of the results of `sets_kernel`.

    With p the softmax: `onehot - p` of the log-prob, `-p (log p + entropy)` of the entropy, and
    `g - p sum(g)` of gradients g of the log-probs of all ids; over the temperature.
    """
    row = tl.program_id(0)
    start, stop = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    target = tl.load(targets_ptr + row)
    if target < 0:
        for first in range(start, stop, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(grad_ptr + at, tl.zeros((BLOCK,), dtype=grad_ptr.dtype.element_ty), mask=at < stop)
    else:
        temperature = tl.load(temperatures_ptr + row).to(grad_ptr.dtype.element_ty)
        total = tl.sum(tl.zeros((BLOCK,), dtype=tl.float64), axis=0)
        if OF_KEPT:
            for first in range(start, stop, BLOCK):
                at = first + tl.arange(0, BLOCK)
                total += tl.sum(tl.load(of_kept_ptr + at, mask=at < stop, other=0.0).to(tl.float64), axis=0)
        sum_kept = total.to(grad_ptr.dtype.element_ty)
        for first in range(start, stop, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < stop
            logprobs = tl.load(kept_ptr + at, mask=inside, other=0.0)
            p = tl.exp(logprobs)
            grad = tl.zeros((BLOCK,), dtype=grad_ptr.dtype.element_ty)
            if OF_LOGPROBS:
                grad += tl.load(of_logprobs_ptr + row) * (tl.where(at == target, 1.0, 0.0) - p)
            if OF_ENTROPY:
                grad -= tl.load(of_entropy_ptr + row) * p * (logprobs + tl.load(entropy_ptr + row))
            if OF_KEPT:
                grad += tl.load(of_kept_ptr + at, mask=inside, other=0.0) - p * sum_kept
            tl.store(grad_ptr + at, grad / temperature, mask=inside)


def dots(inputs: HeadInputs, pairs: DevicePairs, z_N: Tensor) -> None:
    """Writes the logits of the rare pairs to `z_N`."""
    own, width = pairs.by_column, inputs.hidden_TH.shape[1]
    if num_pairs := len(pairs.columns_P):
        dots_kernel[(triton.cdiv(num_pairs, DOT_PAIRS),)](
            inputs.hidden_TH, inputs.weight_VpH, own.sources_P, pairs.columns_P, own.positions_P, z_N, num_pairs, width,
            **_fixed(inputs.dtype, BLOCK=min(DOT_WIDTH, triton.next_power_of_2(width)), PAIRS=DOT_PAIRS),
        )  # fmt: skip


def add_up(sums: Sums, source: Tensor, factors_N: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Writes the sum of every segment that `sums` does not leave alone to its row of `out`, or adds it if `add`; sums
    are float32 or float64."""
    width = source.shape[1]
    block = min(SUM_WIDTH, triton.next_power_of_2(width))
    pieces, fixed = triton.cdiv(width, block), _fixed(factors_N.dtype, BLOCK=block, ADD=add)
    by_pairs = _fixed(factors_N.dtype, BLOCK=block, PAIRS=SUM_PAIRS, ADD=add)
    rows = factors_N, sums.positions_P, sums.sources_P
    if len(sums.counts_S):
        sums_kernel[(len(sums.counts_S), pieces)](source, *rows, sums.starts_S, sums.counts_S, out, width, **by_pairs)
    if num_parts := len(sums.part_counts_C):
        parts_CH = factors_N.new_empty(num_parts, width)
        written = _fixed(factors_N.dtype, BLOCK=block, PAIRS=SUM_PAIRS, ADD=False)
        sums_kernel[(num_parts, pieces)](
            source, *rows, sums.part_starts_C, sums.part_counts_C, parts_CH, width, **written
        )
        parts_kernel[(len(sums.split_L), pieces)](parts_CH, sums.first_parts_L1, sums.split_L, out, width, **fixed)


def score_sets(
    z_N: Tensor, temperatures_T: Tensor, offsets_T1: Tensor, targets_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs of the targets [T], entropies [T] and log-probs of all listed ids [N], 0 on rows without a
    target.

    targets_T: int64; place of the target among the N listed ids, -1 on rows that are not scored in a set.
    """
    logprobs_T, kept_N = z_N.new_empty(len(targets_T)), torch.empty_like(z_N)
    entropy_T = torch.empty_like(logprobs_T)
    if len(targets_T):
        sets_kernel[(len(targets_T),)](
            z_N, temperatures_T, offsets_T1, targets_T, logprobs_T, entropy_T, kept_N, BLOCK=SET_BLOCK
        )
    return logprobs_T, entropy_T, kept_N


def sets_gradient(
    scored: tuple[Tensor, Tensor],
    temperatures_T: Tensor,
    offsets_T1: Tensor,
    targets_T: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """Returns the gradient of `z_N`, [N].

    scored: entropies and log-probs of all listed ids, as `score_sets` returned them. grads: of its three results, None
    if there is none.
    """
    entropy_T, kept_N = scored
    grad_N = torch.empty_like(kept_N)
    # A pointer that is not read, if there is no gradient.
    of_logprobs_T, of_entropy_T, of_kept_N = (kept_N if each is None else each.contiguous() for each in grads)
    names = ("OF_LOGPROBS", "OF_ENTROPY", "OF_KEPT")
    given: dict[str, Any] = {name: each is not None for name, each in zip(names, grads, strict=True)}
    if len(targets_T):
        sets_gradient_kernel[(len(targets_T),)](
            kept_N, entropy_T, temperatures_T, offsets_T1, targets_T, of_logprobs_T, of_entropy_T, of_kept_N, grad_N,
            BLOCK=SET_BLOCK, **given,
        )  # fmt: skip
    return grad_N


def _fixed(dtype: torch.dtype, **sizes: Any) -> dict[str, Any]:
    """Returns the constants that a kernel is compiled for. dtype: of sums."""
    return {"ACCUMULATE": tl.float64 if dtype == torch.float64 else tl.float32, **sizes}
