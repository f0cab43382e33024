"""Lengths offered against lengths trained, against the definition of the distance."""

from __future__ import annotations

import numpy as np
import pytest

from moerl.buffer.lengths import MIN_RESPONSES, Lengths


@pytest.mark.parametrize("seed", range(20))
def test_the_distance_is_that_of_kolmogorov_and_smirnov(seed: int) -> None:
    rng = np.random.default_rng(seed)
    offered, trained = rng.integers(1, 40, rng.integers(1, 300)), rng.integers(5, 50, rng.integers(1, 300))
    lengths = Lengths()
    lengths.offer(0, offered.tolist())
    lengths.train(trained.tolist())
    by_definition = max(abs((offered <= x).mean() - (trained <= x).mean()) for x in range(60))
    assert lengths.distance == pytest.approx(by_definition)
    assert lengths.metrics()["lengths/offered_mean"] == pytest.approx(offered.mean())
    assert lengths.metrics()["lengths/trained_mean"] == pytest.approx(trained.mean())


def test_leaving_out_what_is_long_is_worth_a_warning_and_training_all_is_not() -> None:
    drawn = np.random.default_rng(0).integers(1, 100, 4 * MIN_RESPONSES).tolist()
    all_of_them, short_ones = Lengths(), Lengths()
    for lengths in (all_of_them, short_ones):
        lengths.offer(0, drawn)
    all_of_them.train(drawn)
    short_ones.train([length for length in drawn if length < 70])
    assert all_of_them.distance == 0.0
    said: list[str] = []
    all_of_them.warn(said.append)
    assert said == []
    for _ in range(2):
        short_ones.warn(said.append)
    (warning,) = said
    assert f"lengths/distance {short_ones.distance:.2f}" in warning


def test_a_few_responses_are_not_worth_a_warning() -> None:
    lengths = Lengths()
    lengths.offer(0, range(100))
    lengths.train(range(10))
    assert lengths.distance == pytest.approx(0.9)
    said: list[str] = []
    lengths.warn(said.append)
    assert said == []
    assert Lengths().distance == 0.0
