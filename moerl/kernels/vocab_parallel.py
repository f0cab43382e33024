"""Vocabulary shards and the gather of kept logits across them.

Runs in trainer processes, on every tensor-parallel rank alike: all ranks of a shard's group hold the same
rows and call the same functions in the same order. Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.contract.reasons import Reason
from moerl.errors import ContractError


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The columns of the vocabulary that this rank holds.

    start, end: this rank's logits have the columns [start, end) of the (padded) vocabulary.
    vocab_size: V; columns >= V pad the embedding and belong to no support.
    group: the tensor-parallel group that splits the vocabulary; None where one process holds all of it.

    Raises `ContractError` where the bounds make no sense.
    """

    start: int
    end: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end or self.vocab_size < 1:
            raise ContractError(
                Reason.VOCAB_SHARD_BOUNDS,
                field="shard",
                seen=f"start={self.start}, end={self.end}, vocab_size={self.vocab_size}",
                expected="0 <= start < end and vocab_size >= 1",
                remedy="derive the shard from the tensor-parallel rank with VocabShard.from_group",
            )
        if self.group is None and (self.start > 0 or self.end < self.vocab_size):
            raise ContractError(
                Reason.VOCAB_SHARD_WITHOUT_GROUP,
                field="shard",
                seen=f"columns [{self.start}, {self.end}) and no group",
                expected=f"all {self.vocab_size} ids in one process, or the tensor-parallel group",
                remedy="pass the tensor-parallel group",
            )

    @classmethod
    def from_group(cls, vocab_size: int, num_columns: int, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard of this rank where every rank of `group` holds `num_columns` columns, in rank order."""
        start = 0 if group is None else dist.get_rank(group) * num_columns
        return cls(start, start + num_columns, vocab_size, group)

    @property
    def num_columns(self) -> int:
        """Vp: columns of this rank's logits, padding included."""
        return self.end - self.start

    @property
    def num_real_columns(self) -> int:
        """Columns of this rank that are tokens; the rest, always at the end, is padding."""
        return min(max(self.vocab_size - self.start, 0), self.num_columns)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Local columns of global `ids`, clamped to the shard, and True where this rank holds the id."""
        columns = ids - self.start
        own = (columns >= 0) & (columns < self.num_real_columns)
        return columns.clamp(0, self.num_columns - 1), own

    def sum_(self, values: Tensor) -> Tensor:
        """Sums `values` over the group in place, and returns it."""
        if self.group is not None and values.numel():
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.group)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """Maximum of `values` over the group in place, and returns it."""
        if self.group is not None and values.numel():
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values


def compute_dtype(logits: Tensor) -> torch.dtype:
    """The dtype in which `logits` are scored: float32, or float64 where the logits are float64."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def check_logits(logits_TVp: Tensor, shard: VocabShard, **per_row: Tensor) -> None:
    """Raises `ContractError` where logits do not fit the shard or a per-row tensor is not [T]."""
    if logits_TVp.dim() != 2 or logits_TVp.shape[1] != shard.num_columns:
        raise ContractError(
            Reason.LOGITS_SHAPE,
            field="logits",
            seen=tuple(logits_TVp.shape),
            expected=f"[T, {shard.num_columns}], the columns [{shard.start}, {shard.end})",
            remedy="flatten the logits to rows and pass the shard of this tensor-parallel rank",
        )
    for name, value in per_row.items():
        if value.shape != (logits_TVp.shape[0],):
            raise ContractError(
                Reason.ROWS_DIFFER,
                field=name,
                seen=tuple(value.shape),
                expected=f"[{logits_TVp.shape[0]}], one value per row of the logits",
                remedy="pass the per-row arrays of the same microbatch as the logits",
            )


def gather_kept_logits(logits_TVp: Tensor, rows_N: Tensor, ids_N: Tensor, shard: VocabShard) -> Tensor:
    """Logits at the pairs (row, global id), the same on every rank of the shard's group.

    Costs one all-reduce of N numbers forward and no communication backward: what is computed from the result
    is replicated, so its gradient is already whole on every rank, and each rank scatters it to the ids it
    holds.

    Args:
        logits_TVp: this rank's logits, any float dtype.
        rows_N: int64 row of each pair. ids_N: int64 global id of each pair, in [0, V).
        shard: the columns this rank holds.

    Returns:
        float32 [N] (float64 for float64 logits), differentiable.
    """
    check_logits(logits_TVp, shard)
    return _GatherKept.apply(logits_TVp, rows_N, ids_N, shard)  # type: ignore[return-value]


class _GatherKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TVp: Tensor, rows_N: Tensor, ids_N: Tensor, shard: VocabShard) -> Tensor:
        columns_N, own_N = shard.local(ids_N)
        values_N = logits_TVp[rows_N, columns_N].to(compute_dtype(logits_TVp))
        ctx.save_for_backward(rows_N, columns_N, own_N)
        ctx.logits_shape, ctx.logits_dtype = logits_TVp.shape, logits_TVp.dtype
        return shard.sum_(values_N.masked_fill(~own_N, 0))

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows_N, columns_N, own_N = ctx.saved_tensors
        grad_N = grads[0].masked_fill(~own_N, 0).to(ctx.logits_dtype)
        grad_TVp = grad_N.new_zeros(ctx.logits_shape)
        grad_TVp.view(-1).index_add_(0, rows_N * ctx.logits_shape[1] + columns_N, grad_N)
        return grad_TVp, None, None, None
