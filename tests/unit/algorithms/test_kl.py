"""KL terms per token."""

from __future__ import annotations

import math

import pytest
import torch
from policy_rows import policy_rows

from moerl.algorithms.losses import k3_estimate, kl_penalty


def test_the_penalty_adds_the_scaled_kl_on_trained_tokens_with_its_gradient() -> None:
    kl = torch.tensor([0.5, float("nan"), 2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    loss = kl_penalty(torch.tensor([1.0, 0.0, -1.0]), policy_rows(torch.zeros(3), kl_T=kl, mask_T=mask), 0.1)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([1.05, 0.0, -0.8]))
    assert kl.grad is not None
    torch.testing.assert_close(kl.grad, torch.tensor([0.1, 0.0, 0.1]))


def test_the_expected_k3_estimate_is_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler, other = torch.log_softmax(torch.randn(2, 11, dtype=torch.float64, generator=generator), -1)
    exact = (sampler.exp() * (sampler - other)).sum()
    torch.testing.assert_close((sampler.exp() * k3_estimate(sampler, other)).sum(), exact)
    assert (k3_estimate(sampler, other) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [-1e4, -1.0, 0.0, 1e-4, 2.0, 70.0])
def test_the_k3_estimate_and_its_gradient_are_the_formulas(difference: float, dtype: torch.dtype) -> None:
    other = torch.tensor([difference], dtype=dtype, requires_grad=True)
    estimate = k3_estimate(torch.zeros(1, dtype=dtype), other)
    (gradient,) = torch.autograd.grad(estimate.sum(), other)
    exact = float(other.detach())
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    assert float(estimate.detach()) == pytest.approx(math.expm1(exact) - exact, rel=tolerance, abs=1e-7)
    assert float(gradient) == pytest.approx(math.expm1(exact), rel=tolerance, abs=1e-7)


@pytest.mark.parametrize(("dtype", "difference"), [(torch.float32, 89.0), (torch.float64, 800.0), (torch.float64, 1e9)])
def test_a_k3_estimate_beyond_its_dtype_stays_finite(difference: float, dtype: torch.dtype) -> None:
    other = torch.full((10000,), difference, dtype=dtype, requires_grad=True)
    total = k3_estimate(torch.zeros_like(other), other).sum()
    (gradient,) = torch.autograd.grad(total, other)
    assert 1e30 < float(total.detach()) < math.inf
    assert (gradient > 1e30).all()
    assert torch.isfinite(gradient).all()
