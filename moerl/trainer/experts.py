"""Experts of a rank in few passes over their rows. Megatron's experts run some twenty operations each, and copy all
rows to split them and to join them again.

Runs in every trainer rank without a GPU. Imports Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from moerl.kernels.host import gated, gated_backward


class Experts(SequentialMLP):
    """Megatron's `SequentialMLP`, with the same parameters, checkpoints and results. SwiGLU in float32 is computed
    here, unless a linear layer has hooks or is of another class."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Applies the experts to rows [R, H] sorted by expert, with the number of rows of each [E] and their weights
        from the router [R]; returns [R, H] and no bias."""
        rows, weights = permuted_local_hidden_states, permuted_probs
        experts: Any = self.local_experts
        layers = [each for expert in experts for each in (expert.linear_fc1, expert.linear_fc2)]
        is_float32 = rows.dtype == weights.dtype == torch.float32
        if not (is_float32 and self._is_swiglu and all(map(_is_plain, layers))):
            return super().forward(rows, tokens_per_expert, weights)
        return _SwiGLU.apply(rows, weights, tokens_per_expert.tolist(), *(layer.weight for layer in layers)), None

    @property
    def _is_swiglu(self) -> bool:
        config: Any = self.config
        is_plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
        is_swiglu = config.gated_linear_unit and config.activation_func is F.silu and is_plain
        return is_swiglu and not config.add_bias_linear and not config.moe_apply_probs_on_input


def _is_plain(layer: nn.Module) -> bool:
    """Returns True for a plain linear layer without hooks. If parameters are gathered while other layers compute, a
    hook of their layer waits for them."""
    is_heard = layer._forward_pre_hooks or layer._forward_hooks  # pyright: ignore[reportPrivateUsage]
    return type(layer) in (ColumnParallelLinear, RowParallelLinear) and not is_heard


class _SwiGLU(torch.autograd.Function):
    """Function y = w down(silu(gate(x)) up(x)) of every row x, with the matrices of its expert and the row's weight w.

    parameters: of each expert in turn gates and ups [2 F, H], and down [H, F].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: Sequence[int], *parameters: Tensor) -> Tensor:
        gates_ups = rows.new_empty(len(rows), parameters[0].shape[0])
        for x, h, weight in zip(rows.split(counts), gates_ups.split(counts), parameters[::2], strict=True):
            torch.mm(x, weight.t(), out=h)
        hidden, out = gated(gates_ups, weights), torch.empty_like(rows)
        for h, y, weight in zip(hidden.split(counts), out.split(counts), parameters[1::2], strict=True):
            torch.mm(h, weight.t(), out=y)
        ctx.counts = counts
        ctx.save_for_backward(rows, weights, gates_ups, *parameters)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), counts = gradients, ctx.counts
        rows, weights, gates_ups, *parameters = ctx.saved_tensors
        to_hidden = rows.new_empty(len(rows), parameters[1].shape[1])
        for g, h, weight in zip(gradient.split(counts), to_hidden.split(counts), parameters[1::2], strict=True):
            torch.mm(g, weight, out=h)
        to_gates_ups, to_weights, hidden = gated_backward(gates_ups, weights, to_hidden)
        to_rows, to_parameters = torch.empty_like(rows), list[Tensor]()
        of_expert = (each.split(counts) for each in (rows, gradient, hidden, to_gates_ups, to_rows))
        for x, g, h, to_h, to_x, weight in zip(*of_expert, parameters[::2], strict=True):
            torch.mm(to_h, weight, out=to_x)
            to_parameters += [to_h.t() @ x, g.t() @ h]
        return to_rows, to_weights, None, *to_parameters
