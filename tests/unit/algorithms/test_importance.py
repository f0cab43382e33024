"""Truncated importance weights and what describes them."""

from __future__ import annotations

import torch

from moerl.algorithms.importance import truncated_importance_weights

PROXIMAL = torch.tensor([-1.0, -2.0, -0.5, -3.0]).requires_grad_()
ROLLOUT = torch.tensor([-1.5, -1.0, -4.0, -3.0])


def test_weights_are_the_ratio_up_to_the_cap_and_carry_no_gradient() -> None:
    weights = truncated_importance_weights(PROXIMAL, ROLLOUT, 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.6487213, 0.36787945, 2.0, 1.0]))
    assert not weights.requires_grad


def test_a_ratio_too_large_for_float32_is_capped() -> None:
    weights = truncated_importance_weights(torch.zeros(1), torch.tensor([-1000.0]), 2.0)
    assert weights.tolist() == [2.0]
