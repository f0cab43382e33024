"""RMSNorm in few passes over its rows: torch composes its own from single operations on a CPU, and keeps the results of
several for the backward pass.

Runs in every trainer rank without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moerl.kernels.host import rms_norm, rms_norm_backward


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension; in float32 backward keeps the input and one number per row."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns y = weight * x / sqrt(mean(x^2) + eps) of x [..., H], in the dtype of x."""
        if x.dtype != torch.float32:
            return super().forward(x)
        return _Normed.apply(x, self.weight, self.eps)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y, scales = rms_norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, scales)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (rows, weight, scales) = gradients, ctx.saved_tensors
        to_rows, to_weight = rms_norm_backward(rows, weight, scales, gradient.reshape(rows.shape))
        return to_rows.view(gradient.shape), to_weight, None
