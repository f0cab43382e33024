"""Truncated importance weights and what describes them."""

from __future__ import annotations

import pytest
import torch

from moerl.algorithms.importance import ImportanceSums, importance_sums, truncated_importance_weights

PROXIMAL = torch.tensor([-1.0, -2.0, -0.5, -3.0]).requires_grad_()
ROLLOUT = torch.tensor([-1.5, -1.0, -4.0, -3.0])


def test_weights_are_the_ratio_up_to_the_cap_and_carry_no_gradient() -> None:
    weights = truncated_importance_weights(PROXIMAL, ROLLOUT, 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.6487213, 0.36787945, 2.0, 1.0]))
    assert not weights.requires_grad


def test_a_ratio_too_large_for_float32_is_capped() -> None:
    weights = truncated_importance_weights(torch.zeros(1), torch.tensor([-1000.0]), 2.0)
    assert weights.tolist() == [2.0]


def test_sums_of_microbatches_add_up_to_those_of_the_batch() -> None:
    weights = truncated_importance_weights(PROXIMAL, ROLLOUT, 2.0)
    mask = torch.tensor([True, True, True, False])
    whole = importance_sums(weights, mask, 2.0).finalize()
    parts = [importance_sums(weights[part], mask[part], 2.0) for part in (slice(0, 2), slice(2, 4))]
    assert sum(parts, ImportanceSums()).finalize() == pytest.approx(whole)
    assert whole["importance_mean"] == pytest.approx((1.6487213 + 0.36787945 + 2) / 3)
    assert whole["importance_capped_share"] == pytest.approx(1 / 3)
    squares = 1.6487213**2 + 0.36787945**2 + 4
    assert whole["importance_effective_share"] == pytest.approx((1.6487213 + 0.36787945 + 2) ** 2 / (3 * squares))


def test_no_tokens_give_no_metrics() -> None:
    assert importance_sums(torch.ones(2), torch.zeros(2, dtype=torch.bool), 2.0).finalize() == {}
