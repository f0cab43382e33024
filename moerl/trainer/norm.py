"""RMSNorm in few passes over its rows: torch's own is put together from single operations on a CPU, of whose results
backward keeps several.

Runs in every trainer rank without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension; in float32 backward keeps the input and one number per row."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; y = weight * x / sqrt(mean(x^2) + eps), in its dtype."""
        if x.dtype != torch.float32:
            return super().forward(x)
        return _Normed.apply(x, self.weight, self.eps)


class _Normed(torch.autograd.Function):
    """With s = 1 / sqrt(mean(x^2) + eps) and z = x s: y = w z; dw = sum over rows of dy z, and
    dx = s (dy w - z mean(dy w z))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = (gradient * normed).reshape(-1, x.shape[-1])
        mean = (product @ weight).div_(x.shape[-1]).view(scale.shape)
        to_weight = product.new_ones(len(product)) @ product
        return (gradient * weight).addcmul_(normed, mean, value=-1).mul_(scale), to_weight, None
