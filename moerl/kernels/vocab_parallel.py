"""Vocabulary shards.

Runs in trainer processes, on every tensor-parallel rank alike: all ranks of a shard's group hold the same
rows and call the same functions in the same order. Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from moerl.contract.reasons import Reason
from moerl.errors import ContractError


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The columns [start, end) of the (padded) vocabulary whose logits this rank computes. Raises `ContractError` if
    the bounds contradict each other."""

    start: int
    """First column."""
    end: int
    """Column after the last, padding included."""
    vocab_size: int
    """V; columns >= V pad the embedding and belong to no support."""
    group: dist.ProcessGroup | None = None
    """Tensor-parallel group that splits the vocabulary; None if one process holds all of it."""

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
        """Returns the shard of this rank; every rank of `group` holds `num_columns` columns, in rank order."""
        start = 0 if group is None else dist.get_rank(group) * num_columns
        return cls(start, start + num_columns, vocab_size, group)

    @property
    def bounds(self) -> tuple[int, int, int]:
        """`start`, `end` and V: equal on shards of the same columns."""
        return self.start, self.end, self.vocab_size

    @property
    def num_columns(self) -> int:
        """Vp: columns of this rank's logits, padding included."""
        return self.end - self.start

    @property
    def num_real_columns(self) -> int:
        """Columns of this rank that are tokens; the rest, always at the end, is padding."""
        return min(max(self.vocab_size - self.start, 0), self.num_columns)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the local columns of global `ids`, clamped to the shard, and True where this rank holds the id."""
        columns = ids - self.start
        own = (columns >= 0) & (columns < self.num_real_columns)
        return columns.clamp(0, self.num_columns - 1), own

    def sum_(self, values: Tensor) -> Tensor:
        """Sums `values` over the group in place, and returns it."""
        if self.group is not None and values.numel():
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.group)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """Takes the maximum of `values` over the group in place, and returns it."""
        if self.group is not None and values.numel():
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values
