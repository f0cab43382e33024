from __future__ import annotations

import pytest
import torch
from torch import nn

from moerl.trainer.norm import RMSNorm


@pytest.mark.parametrize("shape", [(7, 1, 24), (5, 3, 16)], ids=str)
def test_output_and_gradients_are_those_of_torch(shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (each(shape[-1], eps=1e-3) for each in (RMSNorm, nn.RMSNorm))
    weight = torch.randn(shape[-1], generator=generator)
    x, upstream = torch.randn(2, *shape, generator=generator)
    found = []
    for module in (ours, theirs):
        module.weight.data.copy_(weight)
        of = x.clone().requires_grad_()
        y = module(of)
        found.append([y.detach(), *torch.autograd.grad(y, [of, module.weight], upstream)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_of_rows_that_do_not_lie_in_one_piece():
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module = RMSNorm(8, eps=1e-6)
    (gradient,) = torch.autograd.grad(module(x.transpose(0, 1)).square().sum(), x)
    (expected,) = torch.autograd.grad(nn.RMSNorm(8, eps=1e-6)(x.transpose(0, 1)).square().sum(), x)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


def test_other_types_are_left_to_torch():
    module = RMSNorm(8, eps=1e-6, dtype=torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(module(x), nn.RMSNorm(8, eps=1e-6, dtype=torch.bfloat16)(x))
