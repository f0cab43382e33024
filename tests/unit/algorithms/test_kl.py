"""KL terms per token."""

from __future__ import annotations

import torch

from moerl.algorithms.kl import k3_estimate, kl_penalty


def test_the_penalty_adds_the_scaled_kl_on_trained_tokens_with_its_gradient() -> None:
    kl = torch.tensor([0.5, float("nan"), 2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    loss = kl_penalty(torch.tensor([1.0, 0.0, -1.0]), kl, mask, 0.1)
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
