"""Sums over the full vocabulary in slabs of columns, from hidden states and head.

Runs in trainer processes. The forward pass keeps running maxima and sums per row; the backward pass computes each slab
of logits again. Slabs are the outer loop, so each row of the head's gradient is summed over all rows in float32 and
rounded once, and extra memory is a few slabs (`slab_columns`) and a few numbers per row, however large T x V.
Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.kernels.head import HeadInputs
from moerl.kernels.products import matmul, slab_columns
from moerl.kernels.vocab_parallel import VocabShard


@dataclass(frozen=True, slots=True, eq=False)
class FullRows:
    """Rows scored over the full vocabulary: rows_R int64 [R], distinct; temperatures_R [R]; target_ids_R int64 [R],
    global ids."""

    rows_R: Tensor
    temperatures_R: Tensor
    target_ids_R: Tensor

    def __len__(self) -> int:
        return len(self.rows_R)


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """The tempered logits of some rows of one model, slab by slab.

    hidden_RH: the rows. temperatures_R1: [R, 1], dtype of scores. weight_VpH, shard: the head.
    """

    hidden_RH: Tensor
    temperatures_R1: Tensor
    weight_VpH: Tensor
    shard: VocabShard

    @classmethod
    def of(cls, inputs: HeadInputs, rows_R: Tensor, temperatures_R: Tensor) -> Slabs:
        hidden_RH = inputs.hidden_TH.index_select(0, rows_R)
        return cls(hidden_RH, temperatures_R[:, None].to(inputs.dtype), inputs.weight_VpH, inputs.shard)

    def spans(self) -> Iterator[slice]:
        """Columns of each slab; padding is left out. None where there is nothing to score."""
        width = slab_columns(*self.hidden_RH.shape)
        if len(self.hidden_RH):
            for start in range(0, self.shard.num_real_columns, width):
                yield slice(start, min(start + width, self.shard.num_real_columns))

    def logits(self, span: slice) -> Tensor:
        """A fresh [R, columns of the slab], divided by the temperatures."""
        return matmul(self.hidden_RH, self.weight_VpH[span].t()).div_(self.temperatures_R1)


@dataclass(slots=True, eq=False)
class RunningSums:
    """Per row: the maximum so far, `sum e` and `sum e w`, with `e = exp(x - max)` and a weight w per column.

    centred: w is `x - max`; else the weights are given with each slab.
    """

    max_R: Tensor
    sum_R: Tensor
    weighted_R: Tensor
    centred: bool

    @classmethod
    def empty(cls, slabs: Slabs, *, centred: bool) -> RunningSums:
        zeros_R = slabs.temperatures_R1.new_zeros(len(slabs.hidden_RH))
        return cls(zeros_R.new_full(zeros_R.shape, float("-inf")), zeros_R, zeros_R, centred)

    def add(self, x_RC: Tensor, weights_RC: Tensor | None = None) -> None:
        """Takes in a slab, which is overwritten; `weights_RC` unless centred."""
        max_R = torch.maximum(self.max_R, x_RC.amax(-1))
        self._move(max_R)
        x_RC -= max_R[:, None]
        e_RC = x_RC.exp()
        self.sum_R = self.sum_R + e_RC.sum(-1)
        self.weighted_R = self.weighted_R + e_RC.mul_(x_RC if weights_RC is None else weights_RC).sum(-1)

    def merge(self, shard: VocabShard) -> None:
        """Adds up over all shards; one all-reduce of maxima and one of sums."""
        self._move(shard.max_(self.max_R.clone()))
        self.sum_R, self.weighted_R = shard.sum_(torch.stack([self.sum_R, self.weighted_R]))

    def _move(self, max_R: Tensor) -> None:
        """Brings the sums to another maximum; they are 0 where there has been no column yet."""
        delta_R = torch.where(self.max_R.isneginf(), 0.0, self.max_R - max_R)
        if self.centred:
            self.weighted_R = self.weighted_R + delta_R * self.sum_R
        self.sum_R, self.weighted_R, self.max_R = self.sum_R * delta_R.exp(), self.weighted_R * delta_R.exp(), max_R


def full_row_scores(inputs: HeadInputs, full_rows: FullRows) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets [R], entropies [R], and `log sum exp` [R] for the backward pass.

    With `x = logits / temperature`: `x_a - logsumexp(x)` and `logsumexp(x) - E[x]`. No gradient is recorded.
    """
    slabs = Slabs.of(inputs, full_rows.rows_R, full_rows.temperatures_R)
    sums = RunningSums.empty(slabs, centred=True)
    target_R = slabs.temperatures_R1.new_zeros(len(full_rows))
    columns_R, own_R = inputs.shard.local(full_rows.target_ids_R)
    for span in slabs.spans():
        x_RC = slabs.logits(span)
        here_R = own_R & (columns_R >= span.start) & (columns_R < span.stop)
        picked_R = x_RC.gather(1, (columns_R - span.start).clamp(0, x_RC.shape[1] - 1)[:, None])[:, 0]
        target_R = torch.where(here_R, picked_R, target_R)
        sums.add(x_RC)
    sums.merge(inputs.shard)
    target_R = inputs.shard.sum_(target_R)
    log_R = sums.sum_R.log()
    return target_R - sums.max_R - log_R, log_R - sums.weighted_R / sums.sum_R, sums.max_R + log_R


@dataclass(frozen=True, slots=True, eq=False)
class FullGradients:
    """What the backward pass of `full_row_scores` needs: `log sum exp` and entropies of the forward pass, and the
    gradients of log-probs and entropies, None where there is none; all [R]."""

    log_sum_R: Tensor
    entropy_R: Tensor
    of_logprobs_R: Tensor | None
    of_entropy_R: Tensor | None


def add_full_gradients(
    inputs: HeadInputs, full_rows: FullRows, grads: FullGradients, grad_TH: Tensor | None, grad_VpH: Tensor | None
) -> None:
    """Adds the gradient of log-probs and entropies to `grad_TH` ([T, H], dtype of scores) and `grad_VpH`.

    With p the softmax of x: `onehot - p` of a log-prob, `-p (log p + entropy)` of an entropy.
    """
    slabs = Slabs.of(inputs, full_rows.rows_R, full_rows.temperatures_R)
    columns_R, own_R = inputs.shard.local(full_rows.target_ids_R)

    nothing_R = torch.zeros_like(grads.log_sum_R)
    scale_R1 = (nothing_R if grads.of_logprobs_R is None else grads.of_logprobs_R)[:, None] / slabs.temperatures_R1

    def gradient_of_logits(span: slice) -> Tensor:
        x_RC = slabs.logits(span).sub_(grads.log_sum_R[:, None])
        of_entropy_RC = None
        if grads.of_entropy_R is not None:
            of_entropy_RC = x_RC.exp().mul_(x_RC + grads.entropy_R[:, None])
            of_entropy_RC.mul_(grads.of_entropy_R[:, None] / slabs.temperatures_R1)
        x_RC = x_RC.exp_().neg_()
        here_R = own_R & (columns_R >= span.start) & (columns_R < span.stop)
        # Added before any rounding: in bfloat16 the difference `1 - p` of a likely target would be lost.
        local_R1 = (columns_R - span.start).clamp(0, x_RC.shape[1] - 1)[:, None]
        x_RC.scatter_add_(1, local_R1, here_R[:, None].to(x_RC.dtype)).mul_(scale_R1)
        return x_RC if of_entropy_RC is None else x_RC.sub_(of_entropy_RC)

    add_slab_gradients(slabs, gradient_of_logits, full_rows.rows_R, grad_TH, grad_VpH)


def add_slab_gradients(
    slabs: Slabs,
    gradient_of_logits: Callable[[slice], Tensor],
    rows_R: Tensor,
    grad_TH: Tensor | None,
    grad_VpH: Tensor | None,
) -> None:
    """Adds what the gradient of the logits of each slab (`gradient_of_logits(span)` [R, columns]) means for hidden
    states and head."""
    grad_RH = slabs.temperatures_R1.new_zeros(slabs.hidden_RH.shape) if grad_TH is not None else None
    for span in slabs.spans():
        grad_RC = gradient_of_logits(span)
        if grad_RH is not None:
            grad_RH += matmul(grad_RC, slabs.weight_VpH[span])
        if grad_VpH is not None:
            grad_VpH[span] += matmul(grad_RC.t(), slabs.hidden_RH)
    if grad_RH is not None and grad_TH is not None:
        grad_TH[rows_R] += grad_RH
