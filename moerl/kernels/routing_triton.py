"""Sums over routing maps and choices as Triton kernels, one launch each. Runs in trainer processes on GPUs.

Sums of integers are added with atomics, which give the same digits in every order. Statistics are not integers: a fixed
number of programs walks over the rows, each with sums of its own. Shape legend: `moerl/kernels/routing.py`.
"""

# Triton infers the types of a kernel's arguments.
# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moerl.contract.routing import EXPERT_PRIME, LAYER_PRIME, MIX_1, MIX_2
from moerl.contract.trainer import STATISTICS
from moerl.kernels.routing_inputs import Choices, RoutedRows

PROGRAMS = 256
"""Programs that share the rows of a comparison, and partial sums of each statistic."""
BLOCK_ELEMENTS = 4096
"""Elements of a routing map that a program holds at a time."""
WARPS_OF_CHOICES = 8
"""Warps of a program that compares choices; with Triton's four its numbers do not fit into registers."""

_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_EXPERT_PRIME = tl.constexpr(EXPERT_PRIME)


@triton.jit
def _terms(routed, keys, layer_term, experts):
    """Computes the term of each routed pair in a checksum, uint64; 0 for the others."""
    slots = (experts.to(tl.uint64) + layer_term.to(tl.uint64)) * _EXPERT_PRIME
    x = keys.to(tl.uint64, bitcast=True)[:, None] + slots[None, :]
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return tl.where(routed, x ^ (x >> 31), 0)


@triton.jit
def _routed(map_ptr, rows, inside, experts, num_experts):
    """Loads a block of the routing map: bool [rows, experts]."""
    at = rows.to(tl.int64)[:, None] * num_experts + experts[None, :]
    return tl.load(map_ptr + at, mask=inside[:, None] & (experts < num_experts)[None, :], other=0) != 0


@triton.jit(do_not_specialize=["num_rows", "layer_term"])
def _map_sums_kernel(
    map_ptr, keys_ptr, counted_ptr, real_ptr, checksum_ptr, load_ptr, num_rows, num_experts, layer_term,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, WITH_CHECKSUM: tl.constexpr, WITH_LOAD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    inside = rows < num_rows
    routed = _routed(map_ptr, rows, inside, experts, num_experts)
    if WITH_CHECKSUM:
        counted = tl.load(counted_ptr + rows, mask=inside, other=0) != 0
        terms = _terms(routed & counted[:, None], tl.load(keys_ptr + rows, mask=inside, other=0), layer_term, experts)
        tl.atomic_add(checksum_ptr, tl.sum(tl.sum(terms, axis=1), axis=0).to(tl.int64, bitcast=True))
    if WITH_LOAD:
        real = tl.load(real_ptr + rows, mask=inside, other=0) != 0
        load = tl.sum((routed & real[:, None]).to(tl.int64), axis=0)
        tl.atomic_add(load_ptr + experts, load, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_rows", "layer_term"])
def _row_checksums_kernel(
    map_ptr, keys_ptr, out_ptr, num_rows, num_experts, layer_term, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    inside = rows < num_rows
    routed = _routed(map_ptr, rows, inside, experts, num_experts)
    terms = _terms(routed, tl.load(keys_ptr + rows, mask=inside, other=0), layer_term, experts)
    tl.store(out_ptr + rows, tl.sum(terms, axis=1).to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def _chosen(ids_ptr, rows, inside, experts, NUM_CHOSEN: tl.constexpr):
    """Returns bool [rows, experts]: True for experts that the ids of the row name."""
    chosen = (experts[None, :] < 0) & (rows[:, None] < 0)
    for slot in range(NUM_CHOSEN):
        ids = tl.load(ids_ptr + rows.to(tl.int64) * NUM_CHOSEN + slot, mask=inside, other=-1)
        chosen |= experts[None, :] == ids[:, None]
    return chosen


@triton.jit(do_not_specialize=["num_rows"])
def _choices_kernel(
    scores_ptr, own_ptr, recorded_ptr, routed_ptr, counted_ptr, differing_ptr, statistics_ptr, num_rows, num_experts,
    NUM_CHOSEN: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, LEAVES_SOME_OUT: tl.constexpr,
    NUM_STATISTICS: tl.constexpr,
):  # fmt: skip
    """Compares choices and adds up statistics; programs process blocks of rows in turns. A recorded row names distinct
    experts if it is routed."""
    experts = tl.arange(0, EXPERTS)
    counted_sum = tl.zeros((ROWS,), dtype=tl.float64)
    flips_sum, jaccard_sum, at_flips_sum, elsewhere_sum = counted_sum, counted_sum, counted_sum, counted_sum
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < num_rows
        own = _chosen(own_ptr, rows, inside, experts, NUM_CHOSEN)
        recorded = _chosen(recorded_ptr, rows, inside, experts, NUM_CHOSEN)
        shared = tl.sum((own & recorded).to(tl.int32), axis=1)
        routed = tl.load(routed_ptr + rows, mask=inside, other=0) != 0
        counted = tl.load(counted_ptr + rows, mask=inside, other=0) != 0
        differing = tl.load(differing_ptr + rows, mask=inside, other=0)
        tl.store(differing_ptr + rows, differing + ((shared < NUM_CHOSEN) & routed).to(tl.int32), mask=inside)
        margin = tl.zeros((ROWS,), dtype=tl.float64)
        if LEAVES_SOME_OUT:
            at = rows.to(tl.int64)[:, None] * num_experts + experts[None, :]
            exists = inside[:, None] & (experts < num_experts)[None, :]
            scores = tl.load(scores_ptr + at, mask=exists, other=0.0)
            last_in = tl.min(tl.where(own, scores, float("inf")), axis=1)
            best_out = tl.max(tl.where(own | ~exists, float("-inf"), scores), axis=1)
            margin = (last_in - best_out).to(tl.float64)
        flips = counted & (shared < NUM_CHOSEN)
        jaccard = tl.div_rn(shared.to(tl.float32), (2 * NUM_CHOSEN - shared).to(tl.float32))
        counted_sum += counted.to(tl.float64)
        flips_sum += flips.to(tl.float64)
        jaccard_sum += tl.where(counted, jaccard.to(tl.float64), 0.0)
        at_flips_sum += tl.where(flips, margin, 0.0)
        elsewhere_sum += tl.where(counted & ~flips, margin, 0.0)
    out = statistics_ptr + tl.program_id(0) * NUM_STATISTICS
    tl.store(out, tl.load(out) + tl.sum(counted_sum, axis=0))
    tl.store(out + 1, tl.load(out + 1) + tl.sum(flips_sum, axis=0))
    tl.store(out + 2, tl.load(out + 2) + tl.sum(jaccard_sum, axis=0))
    tl.store(out + 3, tl.load(out + 3) + tl.sum(at_flips_sum, axis=0))
    tl.store(out + 4, tl.load(out + 4) + tl.sum(elsewhere_sum, axis=0))


def add_map_sums(
    routing_map_TE: Tensor, rows: RoutedRows, moe_layer: int, checksum: Tensor | None, load_E: Tensor | None
) -> None:
    """Computes `moerl.kernels.routing.add_map_sums` in one launch."""
    num_rows, num_experts = routing_map_TE.shape
    constants = _constants(num_experts, WITH_CHECKSUM=checksum is not None, WITH_LOAD=load_E is not None)
    _map_sums_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
        _bytes(routing_map_TE), rows.keys_T, _bytes(rows.counted_T), _bytes(rows.real_T),
        rows.keys_T if checksum is None else checksum, rows.keys_T if load_E is None else load_E,
        num_rows, num_experts, _layer_term(moe_layer), **constants,
    )  # fmt: skip


def row_checksums(routing_map_TE: Tensor, keys_T: Tensor, moe_layer: int) -> Tensor:
    """Computes `moerl.kernels.routing.row_checksums` in one launch."""
    num_rows, num_experts = routing_map_TE.shape
    constants, out_T = _constants(num_experts), torch.empty_like(keys_T)
    _row_checksums_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
        _bytes(routing_map_TE), keys_T, out_T, num_rows, num_experts, _layer_term(moe_layer), **constants
    )
    return out_T


def add_choices(choices: Choices, differing_T: Tensor, statistics_CS: Tensor) -> None:
    """Computes `moerl.kernels.routing.add_choices` in one launch."""
    num_rows, num_experts = choices.scores_TE.shape
    num_chosen = choices.own_TK.shape[1]
    constants = _constants(
        num_experts,
        NUM_CHOSEN=num_chosen,
        LEAVES_SOME_OUT=num_chosen < num_experts,
        NUM_STATISTICS=len(STATISTICS),
        num_warps=WARPS_OF_CHOICES,
    )
    _choices_kernel[(PROGRAMS,)](
        choices.scores_TE.contiguous(), choices.own_TK.contiguous(), choices.recorded_TK.contiguous(),
        _bytes(choices.routed_T), _bytes(choices.counted_T), differing_T, statistics_CS, num_rows, num_experts,
        **constants,
    )  # fmt: skip


def _bytes(flags: Tensor) -> Tensor:
    return flags.contiguous().view(torch.uint8)


def _layer_term(moe_layer: int) -> int:
    return moe_layer * LAYER_PRIME + 1


def _constants(num_experts: int, **more: Any) -> dict[str, Any]:
    columns = 1 << (num_experts - 1).bit_length()
    return more | {"ROWS": max(1, BLOCK_ELEMENTS // columns), "EXPERTS": columns}
