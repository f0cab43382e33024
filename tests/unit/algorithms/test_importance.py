"""Truncated importance weights of tokens."""

from __future__ import annotations

import torch
from policy_rows import policy_rows
from torch import Tensor

from moerl.algorithms.importance import importance_weights


def weights(proximal_T: Tensor, rollout_T: Tensor) -> Tensor:
    rows = policy_rows(proximal_T.detach().clone(), proximal_T=proximal_T, rollout_T=rollout_T)
    return importance_weights(rows, "token", 0.0, 2.0)


def test_weights_are_the_ratio_up_to_the_cap_and_carry_no_gradient() -> None:
    proximal_T, rollout_T = torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.5, -1.0, -4.0, -3.0])
    found_T = weights(proximal_T.requires_grad_(), rollout_T)
    torch.testing.assert_close(found_T, torch.tensor([1.6487213, 0.36787945, 2.0, 1.0]))
    assert not found_T.requires_grad


def test_a_ratio_too_large_for_float32_is_capped() -> None:
    assert weights(torch.zeros(1), torch.tensor([-1000.0])).tolist() == [2.0]
