"""Kept sets on the device, and reductions over them.

Runs in trainer processes. A kept set is a segment of the N listed ids; sums over segments are accumulated in
float64, so that a set of thousands of ids loses nothing and the order of additions does not show in the
float32 result.
Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.trajectory import KeptSets


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """The kept sets of a microbatch as flat tensors."""

    rows: Tensor
    """int64 [N]; row of each listed id, ascending."""
    ids: Tensor
    """int64 [N]; global ids, ascending in a row."""
    offsets: Tensor
    """int64 [T + 1]; row t lists ids[offsets[t]:offsets[t + 1]]."""
    truncated: Tensor
    """bool [T]; True on rows that list a set, False on rows whose token was drawn from the full vocabulary."""

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.truncated)


def kept_arrays(kept: KeptSets, truncated: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Returns the fields of `KeptRows` on the host, by name."""
    return {
        "rows": np.repeat(np.arange(len(truncated)), kept.sizes),
        "ids": kept.ids.astype(np.int64),
        "offsets": kept.offsets.astype(np.int64),
        "truncated": np.asarray(truncated, np.bool_),
    }


def segment_sum(values_N: Tensor, rows_N: Tensor, num_rows: int) -> Tensor:
    """Returns the sum of `values_N` per row: [T], dtype of the values, accumulated in float64, differentiable."""
    sums_T = values_N.new_zeros(num_rows, dtype=torch.float64)
    if values_N.is_cuda:
        # On a GPU `index_add` adds with atomics; this sorts first and adds in order.
        return sums_T.index_put((rows_N,), values_N.double(), accumulate=True).to(values_N.dtype)
    return sums_T.index_add(0, rows_N, values_N.double()).to(values_N.dtype)


def segment_log_softmax(z_N: Tensor, rows_N: Tensor, num_rows: int) -> Tensor:
    """Returns the log-softmax within each row's listed ids: `z - logsumexp(z of the row)`, [N], differentiable.

    A row with one id gives exactly 0 with exactly zero gradient.
    """
    return _SegmentLogSoftmax.apply(z_N, rows_N, num_rows)  # type: ignore[return-value]


class _SegmentLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_N: Tensor, rows_N: Tensor, num_rows: int) -> Tensor:
        max_T = z_N.new_full((num_rows,), float("-inf")).scatter_reduce(0, rows_N, z_N, "amax")
        shifted_N = z_N - max_T[rows_N]
        log_sum_T = segment_sum(shifted_N.exp(), rows_N, num_rows).log()
        logprobs_N = shifted_N - log_sum_T[rows_N]
        ctx.save_for_backward(rows_N, logprobs_N)
        ctx.num_rows = num_rows
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows_N, logprobs_N = ctx.saved_tensors
        total_T = segment_sum(grads[0], rows_N, ctx.num_rows)
        return grads[0] - logprobs_N.exp() * total_T[rows_N], None, None


def kl_kept(kept_logprobs_N: Tensor, reference_kept_logprobs_N: Tensor, kept: KeptRows) -> Tensor:
    """Returns the exact KL over each kept set: `sum over kept ids of p (log p - log q)`, nats.

    Args:
        kept_logprobs_N: log p at the listed ids (`KeptScores.kept_logprobs_N`); carries the gradient.
        reference_kept_logprobs_N: log q at the same ids, from a call with the same selected rows. Normalised over the
            kept set or over the full vocabulary: both sums are exact, of different references.
        kept: the sets.

    Returns:
        [T], dtype of the log-probs, 0 on rows that list nothing.
    """
    difference_N = kept_logprobs_N - reference_kept_logprobs_N.detach()
    return segment_sum(kept_logprobs_N.exp() * difference_N, kept.rows, kept.num_rows)
