"""Sums over the full vocabulary in slabs of columns, from hidden states and head.

Runs in trainer processes. The forward pass keeps running maxima and sums per row; the backward pass computes each slab
of logits again. Slabs are the outer loop, so each row of the head's gradient is summed over these rows in float32 and
rounded once, and extra memory is a few slabs (`slab_columns`) and a few numbers per row, however large T x V.

On a GPU (`moerl.kernels.slabs_triton`) a slab is a product and one kernel forward, and a product, one kernel and two
products backward. The gradient of the logits is computed in float32, and rounded to the dtype of the head as the factor
of the last two.

Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.kernels import products
from moerl.kernels.head import HeadInputs, VocabShard
from moerl.kernels.products import add_product, matmul, slab_columns, write_product


@dataclass(frozen=True, slots=True, eq=False)
class FullRows:
    """Rows scored over the full vocabulary."""

    rows_R: Tensor
    """int64, distinct."""
    temperatures_R: Tensor
    """float32, > 0."""
    columns_R: Tensor
    """int64; targets less the first column of the shard, so those of other shards lie outside of it."""
    whole: bool
    """True if the rows are all T rows, in order, on a GPU."""

    def __len__(self) -> int:
        return len(self.rows_R)


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """The logits of some rows of one model, slab by slab."""

    hidden_RH: Tensor
    """Hidden states of the rows."""
    temperatures_R1: Tensor
    """[R, 1], dtype of scores."""
    weight_VpH: Tensor
    """This rank's rows of the head."""
    shard: VocabShard
    """Columns that `weight_VpH` stands for."""

    @classmethod
    def of(cls, inputs: HeadInputs, rows: FullRows) -> Slabs:
        hidden_RH = inputs.hidden_TH if rows.whole else inputs.hidden_TH.index_select(0, rows.rows_R)
        return cls(hidden_RH, rows.temperatures_R[:, None].to(inputs.dtype), inputs.weight_VpH, inputs.shard)

    @property
    def on_device(self) -> bool:
        """True if kernels of a GPU read the slabs."""
        return products.on_device(self.hidden_RH.device)

    def spans(self) -> Iterator[slice]:
        """Yields the columns of each slab, without padding; nothing if there is nothing to score."""
        width = slab_columns(*self.hidden_RH.shape)
        if len(self.hidden_RH):
            for start in range(0, self.shard.num_real_columns, width):
                yield slice(start, min(start + width, self.shard.num_real_columns))

    def products(self, span: slice) -> Tensor:
        """Returns a fresh [R, columns of the slab], not divided by the temperatures."""
        return matmul(self.hidden_RH, self.weight_VpH[span].t())

    def logits(self, span: slice) -> Tensor:
        """Returns a fresh [R, columns of the slab], divided by the temperatures."""
        return self.products(span).div_(self.temperatures_R1)


@dataclass(slots=True, eq=False)
class RunningSums:
    """Maximum and sums of each row so far, over `e = exp(x - max)` with a weight w per column."""

    max_R: Tensor
    """Maximum of x; -inf before the first column."""
    sum_R: Tensor
    """`sum e`."""
    weighted_R: Tensor
    """`sum e w`."""
    centred: bool
    """True if w is `x - max`; else the weights are given with each slab."""

    @classmethod
    def empty(cls, slabs: Slabs, *, centred: bool) -> RunningSums:
        zeros_R = slabs.temperatures_R1.new_zeros(len(slabs.hidden_RH))
        return cls(zeros_R.new_full(zeros_R.shape, float("-inf")), zeros_R, zeros_R, centred)

    def add(self, x_RC: Tensor, weights_RC: Tensor | None = None) -> None:
        """Adds a slab, which is overwritten. `weights_RC` is given unless the sums are centred."""
        max_R = torch.maximum(self.max_R, x_RC.amax(-1))
        self._move(max_R)
        x_RC -= max_R[:, None]
        e_RC = x_RC.exp()
        self.sum_R = self.sum_R + e_RC.sum(-1)
        self.weighted_R = self.weighted_R + e_RC.mul_(x_RC if weights_RC is None else weights_RC).sum(-1)

    def merge(self, shard: VocabShard) -> None:
        """Merges the sums of all shards: one all-reduce of maxima and one of sums."""
        self._move(shard.max_(self.max_R.clone()))
        self.sum_R, self.weighted_R = shard.sum_(torch.stack([self.sum_R, self.weighted_R]))

    def _move(self, max_R: Tensor) -> None:
        """Rescales the sums to another maximum; the sums of rows without a column so far stay 0."""
        delta_R = torch.where(self.max_R.isneginf(), 0.0, self.max_R - max_R)
        if self.centred:
            self.weighted_R = self.weighted_R + delta_R * self.sum_R
        self.sum_R, self.weighted_R, self.max_R = self.sum_R * delta_R.exp(), self.weighted_R * delta_R.exp(), max_R


def full_row_scores(inputs: HeadInputs, full_rows: FullRows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs of the targets [R], entropies [R], and `log sum exp` [R] for the backward pass.

    With `x = logits / temperature`: `x_a - logsumexp(x)` and `logsumexp(x) - E[x]`. No gradient is recorded.
    """
    slabs = Slabs.of(inputs, full_rows)
    sums, target_R = (_device_sums if slabs.on_device else _sums)(slabs, full_rows.columns_R)
    sums.merge(inputs.shard)
    target_R = inputs.shard.sum_(target_R)
    log_R = sums.sum_R.log()
    return target_R - sums.max_R - log_R, log_R - sums.weighted_R / sums.sum_R, sums.max_R + log_R


def _sums(slabs: Slabs, columns_R: Tensor) -> tuple[RunningSums, Tensor]:
    """Returns the sums of this shard, and the logits of the targets that it holds, 0 for others."""
    sums = RunningSums.empty(slabs, centred=True)
    target_R = slabs.temperatures_R1.new_zeros(len(slabs.hidden_RH))
    for span in slabs.spans():
        x_RC = slabs.logits(span)
        here_R = (columns_R >= span.start) & (columns_R < span.stop)
        picked_R = x_RC.gather(1, (columns_R - span.start).clamp(0, x_RC.shape[1] - 1)[:, None])[:, 0]
        target_R = torch.where(here_R, picked_R, target_R)
        sums.add(x_RC)
    return sums, target_R


def _device_sums(slabs: Slabs, columns_R: Tensor) -> tuple[RunningSums, Tensor]:
    """Does the work of `_sums` on a GPU: a product and a kernel per slab."""
    from moerl.kernels import slabs_triton

    temperatures_R = slabs.temperatures_R1[:, 0]
    state_4R = slabs_triton.empty_state(temperatures_R, (0,), 4)
    for span in slabs.spans():
        slabs_triton.add(slabs.products(span), temperatures_R, columns_R, state_4R, span.start)
    return RunningSums(state_4R[0], state_4R[1], state_4R[2], centred=True), state_4R[3]


@dataclass(frozen=True, slots=True, eq=False)
class FullGradients:
    """Inputs of the backward pass of `full_row_scores`."""

    log_sum_R: Tensor
    """`log sum exp` of the forward pass."""
    entropy_R: Tensor
    """Entropies of the forward pass."""
    of_logprobs_R: Tensor | None
    """Gradient of the loss with respect to log-probs; None if there is none."""
    of_entropy_R: Tensor | None
    """Gradient of the loss with respect to entropies; None if there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadGradients:
    """Tensors that gradients are added to; None if a gradient is not needed."""

    hidden_TH: Tensor | None
    """Gradient of hidden states, in the dtype of scores."""
    head_VpH: Tensor | None
    """Gradient of the head, in its dtype, or a sum of gradients in float32."""
    is_new: bool = False
    """True if nothing has been written to `head_VpH`, not even zeros."""


def add_full_gradients(inputs: HeadInputs, full_rows: FullRows, grads: FullGradients, into: HeadGradients) -> None:
    """Adds the gradient of log-probs and entropies to `into`.

    With p the softmax of x: `onehot - p` of a log-prob, `-p (log p + entropy)` of an entropy.
    """
    slabs = Slabs.of(inputs, full_rows)
    gradient_of_logits = (_device_gradient if slabs.on_device else _gradient)(slabs, full_rows.columns_R, grads)
    add_slab_gradients(slabs, gradient_of_logits, full_rows, into)


def _gradient(slabs: Slabs, columns_R: Tensor, grads: FullGradients) -> Callable[[slice], Tensor]:
    """Returns a function that computes the gradient of a slab of logits."""
    nothing_R = torch.zeros_like(grads.log_sum_R)
    scale_R1 = (nothing_R if grads.of_logprobs_R is None else grads.of_logprobs_R)[:, None] / slabs.temperatures_R1

    def gradient_of_logits(span: slice) -> Tensor:
        x_RC = slabs.logits(span).sub_(grads.log_sum_R[:, None])
        of_entropy_RC = None
        if grads.of_entropy_R is not None:
            of_entropy_RC = x_RC.exp().mul_(x_RC + grads.entropy_R[:, None])
            of_entropy_RC.mul_(grads.of_entropy_R[:, None] / slabs.temperatures_R1)
        x_RC = x_RC.exp_().neg_()
        here_R = (columns_R >= span.start) & (columns_R < span.stop)
        # Added before any rounding: in bfloat16 the difference `1 - p` of a likely target would be lost.
        local_R1 = (columns_R - span.start).clamp(0, x_RC.shape[1] - 1)[:, None]
        x_RC.scatter_add_(1, local_R1, here_R[:, None].to(x_RC.dtype)).mul_(scale_R1)
        return x_RC if of_entropy_RC is None else x_RC.sub_(of_entropy_RC)

    return gradient_of_logits


def _device_gradient(slabs: Slabs, columns_R: Tensor, grads: FullGradients) -> Callable[[slice], Tensor]:
    """Does the work of `_gradient` on a GPU; gradients come in the dtype of the head, as factors of products."""
    from moerl.kernels import slabs_triton

    rows = slabs.temperatures_R1[:, 0], columns_R
    scored, given = (grads.log_sum_R, grads.entropy_R), (grads.of_logprobs_R, grads.of_entropy_R)
    return lambda span: slabs_triton.gradient(
        slabs.products(span), rows, scored, given, span.start, slabs.weight_VpH.dtype
    )


def add_slab_gradients(
    slabs: Slabs, gradient_of_logits: Callable[[slice], Tensor], full_rows: FullRows, into: HeadGradients
) -> None:
    """Adds the gradients of hidden states and head that follow from those of the logits of each slab
    (`gradient_of_logits(span)` [R, columns])."""
    grad_RH = into.hidden_TH
    if grad_RH is not None and not full_rows.whole:
        grad_RH = slabs.temperatures_R1.new_zeros(slabs.hidden_RH.shape)
    for span in slabs.spans():
        grad_RC = gradient_of_logits(span)
        if grad_RH is not None:
            add_product(grad_RH, grad_RC, slabs.weight_VpH[span])
        if into.head_VpH is not None:
            write_product(into.head_VpH[span], grad_RC.t(), slabs.hidden_RH, add=not into.is_new)
        del grad_RC
    if into.hidden_TH is not None and grad_RH is not None and not full_rows.whole:
        into.hidden_TH[full_rows.rows_R] += grad_RH
    if into.head_VpH is not None and into.is_new:
        into.head_VpH[slabs.shard.num_real_columns :].zero_()
