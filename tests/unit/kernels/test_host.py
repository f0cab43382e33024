"""Row-wise operations on a CPU: the same numbers as torch's autograd in float64, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moerl.kernels import host

ROWS, WIDTH = 700, 24


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exactly(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Result and gradients in float64."""
    wide = [each.double().requires_grad_() for each in inputs]
    result = function(*wide)
    return [result.detach(), *torch.autograd.grad(result, wide, upstream.double())]


def assert_agree(found: list[Tensor], expected: list[Tensor], atol: float = 1e-5) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=1e-5)


def test_a_gated_layer_and_its_gradients():
    gates_ups, weights, upstream = 3 * noise(ROWS, 2 * WIDTH), noise(ROWS, seed=1), noise(ROWS, WIDTH, seed=2)

    def swiglu(gates_ups: Tensor, weights: Tensor) -> Tensor:
        gates, ups = gates_ups.chunk(2, -1)
        return F.silu(gates) * ups * weights[:, None]

    expected = exactly(swiglu, [gates_ups, weights], upstream)
    to_gates_ups, to_weights, again = host.gated_backward(gates_ups, weights, upstream)
    assert_agree([host.gated(gates_ups, weights), to_gates_ups, to_weights], expected)
    assert_agree([again], expected[:1])


def test_rms_norm_and_its_gradients():
    x, weight, upstream = noise(ROWS, WIDTH), noise(WIDTH, seed=1), noise(ROWS, WIDTH, seed=2)
    expected = exactly(lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-3), [x, weight], upstream)
    y, scales = host.rms_norm(x, weight, 1e-3)
    assert_agree([y, *host.rms_norm_backward(x, weight, scales, upstream)], expected)


def test_heads_are_turned_and_turned_back():
    x, angles = noise(ROWS, 3, WIDTH), noise(ROWS, 1, WIDTH // 2, seed=1).repeat(1, 1, 2)
    low, high = x.chunk(2, -1)
    turned = host.turned(x, angles.cos(), angles.sin(), 1)
    torch.testing.assert_close(turned, x * angles.cos() + torch.cat([-high, low], -1) * angles.sin())
    torch.testing.assert_close(host.turned(turned, angles.cos(), angles.sin(), -1), x)


def test_no_rows_have_no_result_and_no_gradients():
    assert host.gated(torch.zeros(0, 2 * WIDTH), torch.zeros(0)).shape == (0, WIDTH)
    _, to_weight = host.rms_norm_backward(
        torch.zeros(0, WIDTH), torch.ones(WIDTH), torch.zeros(0), torch.zeros(0, WIDTH)
    )
    assert torch.equal(to_weight, torch.zeros(WIDTH))


def test_what_is_broken_stays_broken():
    gates_ups = noise(ROWS, 2 * WIDTH)
    gates_ups[5, 3] = torch.nan
    assert host.gated(gates_ups, torch.ones(ROWS)).isnan().nonzero().tolist() == [[5, 3]]
    y, _ = host.rms_norm(gates_ups, torch.ones(2 * WIDTH), 1e-6)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [5]


def test_the_exponential_is_right_to_two_units_in_the_last_place():
    xs = np.concatenate([np.linspace(-87, 88, 20001), np.linspace(-1, 1, 20001)]).astype(np.float32)
    found = np.array([host.exponential(x) for x in xs], np.float64)
    wanted = np.exp(xs.astype(np.float64))
    assert np.abs(found / wanted - 1).max() < 2.4e-7
    assert host.exponential(np.float32(-200.0)) == host.exponential(np.float32(-87.0))
    assert host.exponential(np.float32(200.0)) == host.exponential(np.float32(88.0))
    assert np.isnan(host.exponential(np.float32(np.nan)))
