"""The controller's part of algorithms: numbers of arrays are those of tensors, to the last digit."""

from __future__ import annotations

import numpy as np

from moerl.algorithms import arrays
from moerl.contract.trainer import STATISTICS


def test_statistics_of_routers_over_all_layers_are_those_of_the_sums() -> None:
    sums_LS = np.random.default_rng(0).integers(0, 1000, (48, len(STATISTICS))).astype(np.float64)
    found = arrays.agreement(sums_LS)
    assert {len(values) for values in found.values()} == {48}
    assert arrays.agreement(sums_LS, over_layers=True) == arrays.agreement(sums_LS.sum(0, keepdims=True))


def test_means_over_nothing_are_zero_and_others_are_those_of_the_sums() -> None:
    found = arrays.agreement(np.array([[0.0] * 5, [8.0, 2.0, 7.0, 1.0, 12.0]]))
    assert found == {
        "disagreement": [0.0, 0.25],
        "jaccard": [0.0, 0.875],
        "margin_at_flips": [0.0, 0.5],
        "margin_elsewhere": [0.0, 2.0],
    }
