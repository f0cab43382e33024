"""Experts of a rank without a GPU against Megatron's own, whose results and gradients they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks


def results(layout: Any, path: Path) -> dict[str, Any]:
    from megatron.core.transformer.moe.experts import SequentialMLP

    from moerl.trainer import experts as module

    ours: Any = module
    trainer = tiny_moe.build(layout, path, optimizer=None)
    layers = [m for chunk in trainer.model.chunks for m in chunk.modules() if isinstance(m, SequentialMLP)]
    experts: Any = layers[0]
    parameters = list(experts.parameters())
    generator = torch.Generator().manual_seed(0)
    counts = [5, 0, *([3] * (experts.num_local_experts - 2))]
    hidden = torch.randn(sum(counts), experts.config.hidden_size, generator=generator).requires_grad_()
    weights = torch.rand(sum(counts), generator=generator).requires_grad_()
    upstream = torch.randn(hidden.shape, generator=generator)

    def run(forward: Any) -> list[Any]:
        out, bias = forward(hidden, torch.tensor(counts), weights)
        assert bias is None
        gradients = torch.autograd.grad(out, [hidden, weights, *parameters], upstream)
        return [each.detach().numpy() for each in (out, *gradients)]

    found = {"ours": run(experts.forward), "Megatron's": run(super(ours.Experts, experts).forward)}
    calls: list[int] = []
    apply = ours._SwiGLU.apply
    ours._SwiGLU.apply = lambda *arguments: calls.append(1) or apply(*arguments)
    run(experts.forward)
    experts.config.activation_func_clamp_value = 0.01
    clamped = {"ours": run(experts.forward), "Megatron's": run(super(ours.Experts, experts).forward)}
    experts.config.activation_func_clamp_value = None
    heard: list[int] = []
    last = experts.local_experts[-1].linear_fc2
    handle = last.register_forward_pre_hook(lambda *given: heard.append(1))
    run(experts.forward)
    handle.remove()
    return {
        "heard": len(heard),
        "plain": found,
        "clamped": clamped,
        "computed here": len(calls),
        "are_ours": all(type(layer) is ours.Experts for layer in layers),
    }


@pytest.fixture(scope="module")
def seen(untied: Path, one_process: Ranks) -> dict[str, Any]:
    (found,) = one_process.run(results, untied)
    return found


def test_results_and_all_gradients_are_those_of_megatron(seen: dict[str, Any]) -> None:
    assert seen["are_ours"]
    for ours, theirs in zip(seen["plain"]["ours"], seen["plain"]["Megatron's"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_other_activations_are_left_to_megatron(seen: dict[str, Any]) -> None:
    assert seen["computed here"] == 1
    for ours, theirs in zip(seen["clamped"]["ours"], seen["clamped"]["Megatron's"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_hook_of_one_linear_layer_is_called(seen: dict[str, Any]) -> None:
    """That of `trainer.distributed_optimizer=overlap` waits for the parameters of its layer."""
    assert seen["heard"] == 1
