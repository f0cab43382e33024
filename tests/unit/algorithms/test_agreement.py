"""Natural routing on the side, against a loop over rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.algorithms.agreement import choice_statistics, differs, summarize
from moerl.contract.trainer import STATISTICS


def brute_force(scores_tE: np.ndarray, recorded_tK: np.ndarray, counted_t: np.ndarray) -> dict[str, float]:
    sums: dict[str, float] = dict.fromkeys(STATISTICS, 0.0)
    for scores_E, recorded_K, counted in zip(scores_tE, recorded_tK, counted_t, strict=True):
        if not counted:
            continue
        order = np.argsort(-scores_E)
        k = len(recorded_K)
        natural, recorded = set(order[:k].tolist()), set(recorded_K.tolist())
        margin = float(scores_E[order[k - 1]] - scores_E[order[k]]) if k < len(order) else 0.0
        sums["rows"] += 1
        sums["flips"] += natural != recorded
        sums["jaccard"] += len(natural & recorded) / len(natural | recorded)
        sums["margin_at_flips" if natural != recorded else "margin_elsewhere"] += margin
    return sums


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (16, 8), (4, 4), (3, 1)])
def test_the_sums_are_those_of_a_loop_over_rows(num_experts: int, k: int) -> None:
    rng = np.random.default_rng(num_experts)
    scores_tE = rng.standard_normal((200, num_experts)).astype(np.float32)
    noisy_tE = scores_tE + 0.3 * rng.standard_normal(scores_tE.shape)
    recorded_tK = rng.permuted(np.argsort(-noisy_tE, axis=1)[:, :k], axis=1)
    counted_t = rng.random(200) < 0.8
    scores = torch.from_numpy(scores_tE)
    recorded, counted = torch.from_numpy(recorded_tK), torch.from_numpy(counted_t)
    natural = scores.topk(k).indices
    expected = brute_force(scores_tE, recorded_tK, counted_t)
    found = choice_statistics(scores, natural, recorded, counted)
    np.testing.assert_allclose(found.numpy(), list(expected.values()), rtol=1e-6)
    assert int(differs(natural, recorded, num_experts)[counted].sum()) == expected["flips"]
    assert (expected["flips"] > 0) == (k < num_experts)


def test_means_over_nothing_are_zero_and_others_are_those_of_the_sums() -> None:
    found = summarize(np.array([[0.0] * 5, [8.0, 2.0, 7.0, 1.0, 12.0]]))
    assert found == {
        "disagreement": [0.0, 0.25],
        "jaccard": [0.0, 0.875],
        "margin_at_flips": [0.0, 0.5],
        "margin_elsewhere": [0.0, 2.0],
    }
