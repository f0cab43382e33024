"""Logits at listed pairs (row, id) from hidden states and head, and their gradients.

Runs in trainer processes. Reads only the listed rows of the head. A rank sorts the pairs it owns by id once; each id
then decides by its count how it is computed:

- *rare* ids as sparse dot products, `moerl.kernels.sparse_torch` or, on a GPU, `moerl.kernels.sparse_triton`;
- *common* ids, listed by at least one row in `DENSE_ADVANTAGE`, as columns of a matrix product with all rows, in
  slabs. A set that lists everything thereby becomes the dense pass, in bounded memory.

Deterministic: every sum has one writer and a fixed order. Sums are float32 (float64 for float64 inputs); the
gradient of the head is rounded once. Shape legend: `moerl/kernels/segments.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.kernels import sparse_torch
from moerl.kernels.head import HeadInputs
from moerl.kernels.products import matmul, slab_columns
from moerl.kernels.segments import Segments
from moerl.kernels.vocab_parallel import VocabShard

DENSE_ADVANTAGE = 8
"""A multiply-add of a sparse dot product lasts as long as this many of a matrix product: measured on a CPU
(`bench/kept_scoring.py`), taken to hold on GPUs too. It moves the crossover, not the result."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a microbatch that this rank owns, in two parts; num_listed: N, of all ranks."""

    rare: Segments
    common: Segments
    num_listed: int


def plan_pairs(rows_N: Tensor, ids_N: Tensor, num_rows: int, shard: VocabShard) -> Pairs:
    """Sorts the listed pairs (row, global id) of `num_rows` rows; rows ascending, no pair twice."""
    columns_N, own_N = shard.local(ids_N)
    positions_P = own_N.nonzero().flatten()
    columns_P, order_P = columns_N[positions_P].sort(stable=True)
    positions_P = positions_P[order_P]
    columns_U, counts_U = torch.unique_consecutive(columns_P, return_counts=True)
    is_common_U = counts_U * DENSE_ADVANTAGE >= num_rows
    is_common_P = is_common_U.repeat_interleave(counts_U, output_size=len(positions_P))

    def part(chosen_U: Tensor, chosen_P: Tensor) -> Segments:
        offsets_U1 = torch.nn.functional.pad(counts_U[chosen_U].cumsum(0), (1, 0))
        positions = positions_P[chosen_P]
        return Segments(positions, rows_N[positions], columns_U[chosen_U], offsets_U1)

    return Pairs(part(~is_common_U, ~is_common_P), part(is_common_U, is_common_P), len(rows_N))


def sparse_products(inputs: HeadInputs):
    """The module that computes sparse dot products on the device of `inputs`."""
    if inputs.hidden_TH.is_cuda:
        from moerl.kernels import sparse_triton

        return sparse_triton
    return sparse_torch


def pair_logits(inputs: HeadInputs, pairs: Pairs) -> Tensor:
    """Logits of the pairs that this rank owns, 0 for the others: [N], not yet summed over ranks."""
    z_N = inputs.hidden_TH.new_zeros(pairs.num_listed, dtype=inputs.dtype)
    if len(pairs.rare):
        z_N[pairs.rare.positions_P] = sparse_products(inputs).dots(inputs, pairs.rare)
    for _, slab in pairs.common.slabs(slab_columns(*inputs.hidden_TH.shape)):
        weight_UH = inputs.weight_VpH.index_select(0, slab.columns_U)
        z_TU = matmul(inputs.hidden_TH, weight_UH.t())
        z_N[slab.positions_P] = z_TU[slab.rows_P, slab.slots()]
    return z_N


def add_pair_gradients(
    inputs: HeadInputs, pairs: Pairs, grad_N: Tensor, grad_TH: Tensor | None, grad_VpH: Tensor | None
) -> None:
    """Adds the gradient of `pair_logits` to `grad_TH` ([T, H], dtype of scores) and writes the listed rows of
    `grad_VpH` (dtype of the head)."""
    if len(pairs.rare):
        sparse_products(inputs).add_gradients(inputs, pairs.rare, grad_N[pairs.rare.positions_P], grad_TH, grad_VpH)
    for _, slab in pairs.common.slabs(slab_columns(*inputs.hidden_TH.shape)):
        grad_TU = grad_N.new_zeros(inputs.num_rows, len(slab.columns_U))
        grad_TU[slab.rows_P, slab.slots()] = grad_N[slab.positions_P]
        if grad_TH is not None:
            grad_TH += matmul(grad_TU, inputs.weight_VpH.index_select(0, slab.columns_U))
        if grad_VpH is not None:
            grad_UH = matmul(grad_TU.t(), inputs.hidden_TH)
            grad_VpH.index_copy_(0, slab.columns_U, grad_UH.to(grad_VpH.dtype))
