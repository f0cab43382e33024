"""Mismatch between the trainer's and the engine's log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from moerl.algorithms.mismatch import MismatchSums, mismatch_sums, ratio_quantiles, ratio_sample

ROLLOUT = torch.tensor([-1.0, -2.0, -0.5, 0.0])
TRAINER = torch.tensor([-1.5, -1.0, -0.5, float("nan")])
MASK = torch.tensor([True, True, True, False])


def test_metrics_are_those_of_the_masked_tokens() -> None:
    metrics = mismatch_sums(TRAINER, ROLLOUT, MASK).finalize()
    assert metrics == pytest.approx(
        {
            "mismatch_abs_mean": 0.5,
            "mismatch_abs_max": 1.0,
            "mismatch_k3": (math.exp(-0.5) - 0.5 + math.exp(1.0) - 2.0) / 3,
            "mismatch_ratio_mean": (math.exp(-0.5) + math.exp(1.0) + 1.0) / 3,
            "mismatch_far_share": 1 / 3,
            "mismatch_outside_share": 2 / 3,
        }
    )


def test_sums_of_microbatches_add_up_in_any_order() -> None:
    parts = [mismatch_sums(TRAINER[i : i + 1], ROLLOUT[i : i + 1], MASK[i : i + 1]) for i in range(4)]
    whole = mismatch_sums(TRAINER, ROLLOUT, MASK).finalize()
    assert sum(parts, MismatchSums()).finalize() == pytest.approx(whole)
    assert sum(reversed(parts), MismatchSums()).finalize() == pytest.approx(whole)


def test_identical_logprobs_have_no_mismatch() -> None:
    metrics = mismatch_sums(ROLLOUT, ROLLOUT, torch.ones(4, dtype=torch.bool)).finalize()
    assert metrics.pop("mismatch_ratio_mean") == 1.0
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("difference", [90.0, 1e4, -1e4])
def test_metrics_of_far_tokens_are_finite(difference: float) -> None:
    trainer, mask = torch.full((5000,), difference), torch.ones(5000, dtype=torch.bool)
    metrics = mismatch_sums(trainer, torch.zeros(5000), mask).finalize()
    metrics |= ratio_quantiles(ratio_sample(trainer, torch.zeros(5000), mask, 100))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["mismatch_far_share"] == metrics["mismatch_outside_share"] == 1.0
    assert metrics["mismatch_abs_max"] == abs(difference)


def test_no_tokens_give_no_metrics() -> None:
    assert mismatch_sums(TRAINER, ROLLOUT, torch.zeros(4, dtype=torch.bool)).finalize() == {}
    assert ratio_quantiles(torch.zeros(0)) == {}


def test_quantiles_come_from_a_bounded_evenly_spaced_sample() -> None:
    ratios = torch.linspace(0.5, 1.5, 1001)
    sample = ratio_sample(ratios.log(), torch.zeros(1001), torch.ones(1001, dtype=torch.bool), 501)
    assert len(sample) == 501
    assert ratio_quantiles(sample) == pytest.approx(
        {"mismatch_ratio_p01": 0.51, "mismatch_ratio_p50": 1.0, "mismatch_ratio_p99": 1.49}, rel=1e-5
    )
    assert len(ratio_sample(ratios.log(), torch.zeros(1001), torch.ones(1001, dtype=torch.bool), 500)) <= 500
