"""Rows of a packed microbatch that belong to one sequence, and sums over them. Runs in trainer processes, once per
microbatch. Knows no process group: a caller that cuts sequences over ranks passes a function that adds the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AddParts = Callable[[Tensor], None]
"""Function that adds float64 [N] in place over the ranks that hold the other rows of the same sequences; a collective
of these ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The N sequences of a microbatch, in the order of their rows, as far as these lie on this rank."""

    num_rows_N: Tensor
    """int64; rows of each sequence on this rank, which stand side by side. A sequence of pad rows counts, too."""
    add_parts: AddParts | None = None
    """Adds the sums of the ranks that share sequences; None if every sequence lies on this rank completely."""

    def row_ids(self) -> Tensor:
        """Returns for each row the number of its sequence in the microbatch: int64 [T]. All ranks that share the
        sequence give it the same number."""
        numbers_N = torch.arange(len(self.num_rows_N), device=self.num_rows_N.device)
        return numbers_N.repeat_interleave(self.num_rows_N)

    def sum(self, values_T: Tensor) -> Tensor:
        """Returns for each row the sum of the values over all rows of its sequence, on all ranks: [T], dtype as given.

        Added in float64, so neither packing nor layout changes the result by more than its last digit. The gradient
        goes back to all rows of the sequence, on all ranks. A loss of which every rank adds its own rows is therefore
        counted once. A collective if sequences are cut over ranks: all of these ranks must call it equally often, in
        the same order, whatever the values are.
        """
        return _Sum.apply(values_T, self)  # type: ignore[return-value]

    def spread(self, values_T: Tensor) -> Tensor:
        """Returns `sum` without a gradient. It is its own transpose: the gradient of `sum` is `spread` of the
        gradient."""
        totals_N = torch.segment_reduce(values_T.double(), "sum", lengths=self.num_rows_N, initial=0.0, unsafe=True)
        if self.add_parts is not None:
            self.add_parts(totals_N)
        # With `output_size` and `unsafe` torch reads no numbers from the device, so the host does not wait for it.
        return totals_N.repeat_interleave(self.num_rows_N, output_size=len(values_T)).to(values_T.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_T: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return sequences.spread(values_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.sequences.spread(grads[0]), None
