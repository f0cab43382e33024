"""The language-model head, the shard of the vocabulary that a rank has of it, and its inputs: the one place that
gathers hidden states over sequence parallelism.

Runs in trainer processes of the last pipeline stage, on every tensor-parallel rank alike: all ranks of a shard's group
hold the same rows and call the same functions in the same order. Scores are made from
`HeadInputs`, never from logits, so that no [T, V] tensor exists. The supported families have a head of one matrix
(tied to the embedding or not) without bias, logit scaling or soft-capping; so has `Head`.
Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
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


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """Factors of the logits `hidden_TH @ weight_VpH.T`, both float32, float64, bfloat16 or float16, of one dtype. Made
    by `Head.enter`."""

    hidden_TH: Tensor
    """All T rows, on every rank of the shard's group; its gradient is this rank's part alone."""
    weight_VpH: Tensor
    """This rank's rows of the head."""
    shard: VocabShard
    """Columns that `weight_VpH` stands for."""
    main_grad_VpH: Tensor | None = None
    """The optimizer's sum of gradients of the head, float32, which every pass backward adds to, also one that is asked
    for other gradients alone; None if autograd gets the gradient, in the dtype of the head."""

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.hidden_TH)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores: float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.hidden_TH.dtype == torch.float64 else torch.float32

    def detach(self) -> HeadInputs:
        """Returns the same inputs without gradient."""
        return HeadInputs(self.hidden_TH.detach(), self.weight_VpH.detach(), self.shard)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """This rank's rows of the language-model head or of the embedding tied to it."""

    weight_VpH: Tensor
    """Rows [shard.start, shard.end) of the padded vocabulary."""
    shard: VocabShard
    """Bounds of these rows, and the group that splits the vocabulary."""
    sequence_parallel: bool = False
    """True if hidden states come as this rank's T / tensor rows."""
    main_grad_VpH: Tensor | None = None
    """Sum of gradients of the head, as in `HeadInputs.main_grad_VpH`; None if autograd gets the gradient."""

    def over(self, vocab_size: int) -> Head:
        """Returns the same head with another vocabulary size: ids from `vocab_size` on are padding."""
        return replace(self, shard=replace(self.shard, vocab_size=vocab_size))

    def enter(self, hidden_tH: Tensor) -> HeadInputs:
        """Gathers the rows of a microbatch; once per microbatch, whatever is scored afterwards.

        Without a group: the rows themselves. With sequence parallelism an all-gather, and a reduce-scatter
        backward; else nothing forward and an all-reduce backward, since each rank knows only the part of the
        gradient that comes from its own columns.

        Raises `ContractError` if shapes or dtypes of head, shard, sum of gradients and hidden states disagree.
        """
        num_columns, width = self.weight_VpH.shape
        shapes_agree = hidden_tH.dim() == 2 and hidden_tH.shape[1] == width and num_columns == self.shard.num_columns
        if not shapes_agree or hidden_tH.dtype != self.weight_VpH.dtype:
            raise ContractError(
                Reason.WRONG_SHAPE,
                field="hidden",
                seen=f"hidden {tuple(hidden_tH.shape)} {hidden_tH.dtype}, head {(num_columns, width)} "
                f"{self.weight_VpH.dtype}",
                expected=f"hidden [T, H] and head [{self.shard.num_columns}, H] of one dtype",
                remedy="pass hidden states as rows, with the head of the same model and this rank's shard",
            )
        if self.main_grad_VpH is not None:
            self._check_sum(self.main_grad_VpH)
        if self.shard.group is not None:
            hidden_tH = _Enter.apply(hidden_tH, self.shard.group, self.sequence_parallel)  # type: ignore[assignment]
        return HeadInputs(hidden_tH.contiguous(), self.weight_VpH, self.shard, self.main_grad_VpH)

    def _check_sum(self, main_grad_VpH: Tensor) -> None:
        """Raises `ContractError` if this is no sum of gradients of the head: kernels write to its memory."""
        fits = main_grad_VpH.shape == self.weight_VpH.shape and main_grad_VpH.is_contiguous()
        if not fits or main_grad_VpH.dtype != torch.float32 or main_grad_VpH.device != self.weight_VpH.device:
            raise ContractError(
                Reason.WRONG_SHAPE,
                field="main_grad",
                seen=f"{tuple(main_grad_VpH.shape)} {main_grad_VpH.dtype} on {main_grad_VpH.device}, strides "
                f"{main_grad_VpH.stride()}",
                expected=f"{tuple(self.weight_VpH.shape)} torch.float32 on {self.weight_VpH.device}, row by row",
                remedy="pass the sum of gradients of this rank's rows of the head",
            )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_tH: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if not sequence_parallel:
            return hidden_tH.view_as(hidden_tH)
        size = dist.get_world_size(group)
        hidden_TH = hidden_tH.new_empty(size * len(hidden_tH), hidden_tH.shape[1])
        dist.all_gather_into_tensor(hidden_TH, hidden_tH.contiguous(), group=group)
        return hidden_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # A copy: the gradient may be shared with another consumer.
        grad_TH = grads[0].clone(memory_format=torch.contiguous_format)
        if not ctx.sequence_parallel:
            dist.all_reduce(grad_TH, group=ctx.group)
            return grad_TH, None, None
        size = dist.get_world_size(ctx.group)
        grad_tH = grad_TH.new_empty(len(grad_TH) // size, grad_TH.shape[1])
        dist.reduce_scatter_tensor(grad_tH, grad_TH, group=ctx.group)
        return grad_tH, None, None
