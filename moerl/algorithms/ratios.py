"""Log-ratios of probabilities, made safe to exponentiate. Runs in trainer processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_HEADROOM = 0.8
"""Share of the largest exponent that is used: products and sums of such ratios stay finite."""


def bounded(log_ratio_T: Tensor) -> Tensor:
    """Returns `min(log_ratio, L)`, whose gradient is that of the log-ratio itself.

    L is 0.8 times the largest number whose exponential the dtype holds: 70.97 in float32, 567.8 in float64. An
    exponential that overflows is infinite, and infinity times the 0 of a clipped or masked gradient is NaN. The
    exponential of a bounded log-ratio and its gradient, which are equal, stay at exp(L) instead; smaller log-ratios
    come back bit for bit. NaN stays NaN.
    """
    return _Bounded.apply(log_ratio_T)  # type: ignore[return-value]


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_ratio_T: Tensor) -> Tensor:
        return log_ratio_T.clamp(max=_HEADROOM * math.log(torch.finfo(log_ratio_T.dtype).max))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
