"""Mismatch between the trainer's and the engine's log-probs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moerl.algorithms.arrays import mismatch, ratio_quantiles

ROLLOUT = np.array([-1.0, -2.0, -0.5], np.float32)
TRAINER = np.array([-1.5, -1.0, -0.5], np.float32)


def test_metrics_are_those_of_the_tokens() -> None:
    assert mismatch(TRAINER, ROLLOUT) == pytest.approx(
        {
            "mismatch_abs_mean": 0.5,
            "mismatch_abs_max": 1.0,
            "mismatch_k3": (math.exp(-0.5) - 0.5 + math.exp(1.0) - 2.0) / 3,
            "mismatch_ratio_mean": (math.exp(-0.5) + math.exp(1.0) + 1.0) / 3,
            "mismatch_far_share": 1 / 3,
            "mismatch_outside_share": 2 / 3,
        }
    )


def test_identical_logprobs_have_no_mismatch() -> None:
    metrics = mismatch(ROLLOUT, ROLLOUT)
    assert metrics.pop("mismatch_ratio_mean") == 1.0
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("difference", [90.0, 1e4, -1e4])
def test_metrics_of_far_tokens_are_finite(difference: float) -> None:
    trainer, rollout = np.full(5000, difference, np.float32), np.zeros(5000, np.float32)
    metrics = mismatch(trainer, rollout) | ratio_quantiles(trainer, rollout, 100)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["mismatch_far_share"] == metrics["mismatch_outside_share"] == 1.0
    assert metrics["mismatch_abs_max"] == abs(difference)


def test_no_tokens_give_no_metrics() -> None:
    nothing = np.zeros(0, np.float32)
    assert mismatch(nothing, nothing) == ratio_quantiles(nothing, nothing, 100) == {}


@pytest.mark.parametrize(("most", "used"), [(1001, slice(None)), (501, slice(None, None, 2)), (500, slice(0, None, 3))])
def test_quantiles_come_from_a_bounded_evenly_spaced_sample(most: int, used: slice) -> None:
    ratios = np.random.default_rng(0).permutation(np.linspace(0.5, 1.5, 1001)).astype(np.float32)
    found = ratio_quantiles(np.log(ratios), np.zeros(1001, np.float32), most)
    expected = np.quantile(ratios[used].astype(np.float64), [0.01, 0.5, 0.99])
    assert list(found) == ["mismatch_ratio_p01", "mismatch_ratio_p50", "mismatch_ratio_p99"]
    assert list(found.values()) == pytest.approx(expected.tolist(), rel=1e-5)
