"""Row-wise operations of a model on a CPU, forward and backward, each in one pass over its rows.

torch composes them from single operations, each of which reads and writes all rows. float32 tensors in memory of the
host; rows are divided between as many threads as torch has. Any process.

Shape legend: R = rows, H = hidden size, F = width of a gated layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

_FEW_ROWS = 256
"""Rows that are not worth another thread."""
_SUMS = {"reassoc", "contract", "nsz"}


@njit(fastmath={"contract"}, error_model="numpy", cache=True)
def exponential(x: Any) -> Any:
    """Returns exp(x) to 2e-7 of itself, in operations that compilers turn into vectors; constant beyond -87 and 88.

    x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by a polynomial of degree 7 (Cephes' expf), 2^n by its bits.

    Compiled code of other modules contains this function, and Numba compiles a module anew only if its own file has
    changed: after a change here, remove the `*.nbi` files in `__pycache__` of the modules that call it.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


def gated(gates_ups: Tensor, weights: Tensor) -> Tensor:
    """Returns weighted SwiGLU of rows: [R, F] = weights silu(gates) ups.

    Args:
        gates_ups: float32 [R, 2 F], gates before ups. weights: float32 [R].
    """
    out = gates_ups.new_empty(len(gates_ups), gates_ups.shape[1] // 2)
    gates_ups, weights = (each.detach().contiguous() for each in (gates_ups, weights))
    by_rows(len(out), lambda start, stop: _gated(gates_ups.numpy(), weights.numpy(), out.numpy(), start, stop))
    return out


def gated_backward(gates_ups: Tensor, weights: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `gated` with respect to `gates_ups` and `weights`, and its result again, which was not
    kept.

    With s = 1 / (1 + exp(-g)): d(gates) = w u s (1 + g (1 - s)) dy, d(ups) = w g s dy, d(weights) = sum(g s u dy).

    Args:
        gradient: float32 [R, F], of the result.
    """
    outs = torch.empty_like(gates_ups), torch.empty_like(weights), torch.empty_like(gradient)
    given = tuple(each.detach().contiguous().numpy() for each in (gates_ups, weights, gradient))
    made = tuple(each.numpy() for each in outs)
    by_rows(len(gradient), lambda start, stop: _gated_backward(given, made, start, stop))
    return outs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes RMSNorm of rows: y = weight x s with s = 1 / sqrt(mean(x^2) + eps). Returns y [R, H] and s [R].

    Args:
        x: float32 [R, H]. weight: float32 [H].
    """
    y, scales = torch.empty_like(x), x.new_empty(len(x))
    given = tuple(each.detach().contiguous().numpy() for each in (x, weight))
    made = y.numpy(), scales.numpy()
    by_rows(len(x), lambda start, stop: _rms_norm(given, np.float32(eps), made, start, stop))
    return y, scales


def rms_norm_backward(x: Tensor, weight: Tensor, scales: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `rms_norm` with respect to x [R, H] and weight [H].

    With z = x s: d(weight) = sum over rows of dy z, and dx = s (dy w - z mean(dy w z)).

    Args:
        scales: as `rms_norm` returned them. gradient: float32 [R, H], of y.
    """
    to_x = torch.empty_like(x)
    given = tuple(each.detach().contiguous().numpy() for each in (x, weight, scales, gradient))
    parts = by_rows(len(x), lambda start, stop: _rms_norm_backward(given, to_x.numpy(), start, stop))
    return to_x, torch.from_numpy(functools.reduce(np.add, parts)).float()


def turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Returns RoPE of heads whose halves are turned together: (x1 cos - x2 sin, x2 cos + x1 sin).

    Args:
        x: float32 [R, heads, D]. cos, sin: float32 [R, 1, D], the same in both halves.
        direction: 1, or -1 to turn back.
    """
    given = tuple(each.detach().contiguous().numpy() for each in (x, cos[:, 0], sin[:, 0]))
    out = x.new_empty(x.shape)
    by_rows(len(x), lambda start, stop: _turned(given, np.float32(direction), out.numpy(), start, stop))
    return out


def by_rows[Part](num_rows: int, run: Callable[[int, int], Part], few: int = _FEW_ROWS) -> list[Part]:
    """Runs a kernel over parts [start, stop) that together are all rows, in as many threads as torch has, at most.

    Args:
        few: rows that are not worth another thread.
    """
    threads = min(torch.get_num_threads(), -(-num_rows // few))
    if threads <= 1:
        return [run(0, num_rows)]
    starts = [num_rows * number // threads for number in range(threads + 1)]
    return list(_pool(threads).map(run, starts[:-1], starts[1:]))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


@njit(fastmath=_SUMS, error_model="numpy", nogil=True, cache=True)
def _gated(gates_ups: Any, weights: Any, out: Any, start: int, stop: int) -> None:
    width = out.shape[1]
    for r in range(start, stop):
        gates, ups, weight = gates_ups[r, :width], gates_ups[r, width:], weights[r]
        for i in range(width):
            out[r, i] = gates[i] / (np.float32(1.0) + exponential(-gates[i])) * ups[i] * weight


@njit(fastmath=_SUMS, error_model="numpy", nogil=True, cache=True)
def _gated_backward(given: Any, made: Any, start: int, stop: int) -> None:
    gates_ups, weights, gradient = given
    to_gates_ups, to_weights, out = made
    width = out.shape[1]
    for r in range(start, stop):
        gates, ups, weight = gates_ups[r, :width], gates_ups[r, width:], weights[r]
        to_gates, to_ups = to_gates_ups[r, :width], to_gates_ups[r, width:]
        total = np.float32(0.0)
        for i in range(width):
            share = np.float32(1.0) / (np.float32(1.0) + exponential(-gates[i]))
            silu = gates[i] * share
            unweighted = silu * ups[i]
            total += unweighted * gradient[r, i]
            out[r, i] = unweighted * weight
            weighted = gradient[r, i] * weight
            to_ups[i] = silu * weighted
            to_gates[i] = ups[i] * (share + silu * (np.float32(1.0) - share)) * weighted
        to_weights[r] = total


@njit(fastmath=_SUMS, error_model="numpy", nogil=True, cache=True)
def _rms_norm(given: Any, eps: Any, made: Any, start: int, stop: int) -> None:
    x, weight = given
    y, scales = made
    width = x.shape[1]
    for r in range(start, stop):
        squares = np.float32(0.0)
        for i in range(width):
            squares += x[r, i] * x[r, i]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
        scales[r] = scale
        for i in range(width):
            y[r, i] = weight[i] * (x[r, i] * scale)


@njit(fastmath=_SUMS, error_model="numpy", nogil=True, cache=True)
def _rms_norm_backward(given: Any, to_x: Any, start: int, stop: int) -> Any:
    x, weight, scales, gradient = given
    width = x.shape[1]
    to_weight = np.zeros(width, np.float64)
    for r in range(start, stop):
        scale, mean = scales[r], np.float32(0.0)
        for i in range(width):
            product = gradient[r, i] * (x[r, i] * scale)
            to_weight[i] += product
            mean += product * weight[i]
        mean /= np.float32(width)
        for i in range(width):
            to_x[r, i] = scale * (gradient[r, i] * weight[i] - x[r, i] * scale * mean)
    return to_weight


@njit(fastmath=_SUMS, error_model="numpy", nogil=True, cache=True)
def _turned(given: Any, direction: Any, out: Any, start: int, stop: int) -> None:
    x, cos, sin = given
    half = x.shape[2] // 2
    for r in range(start, stop):
        c, s = cos[r, :half], sin[r, :half]
        for h in range(x.shape[1]):
            low, high = x[r, h, :half], x[r, h, half:]
            to_low, to_high = out[r, h, :half], out[r, h, half:]
            for i in range(half):
                to_low[i] = low[i] * c[i] - high[i] * s[i] * direction
                to_high[i] = high[i] * c[i] + low[i] * s[i] * direction
