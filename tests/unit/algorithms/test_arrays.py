"""The controller's part of algorithms: numbers of arrays are those of tensors, to the last digit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.algorithms import arrays
from moerl.algorithms.agreement import summarize
from moerl.algorithms.mismatch import mismatch_sums, ratio_quantiles, ratio_sample
from moerl.contract.trainer import STATISTICS

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("over_layers", [False, True])
def test_statistics_of_routers_are_those_of_tensors(over_layers: bool) -> None:
    sums_LS = RNG.random((48, len(STATISTICS))) * 1e3
    sums = torch.from_numpy(sums_LS)
    found = arrays.agreement(sums_LS, over_layers=over_layers)
    assert found == summarize(sums.sum(0, keepdim=True) if over_layers else sums)
    assert {len(values) for values in found.values()} == {1 if over_layers else 48}


def test_distances_of_logprobs_are_those_of_tensors() -> None:
    trainer, rollout = (-RNG.random(1001).astype(np.float32) for _ in range(2))
    tensors, all_rows = (torch.from_numpy(trainer), torch.from_numpy(rollout)), torch.ones(1001, dtype=torch.bool)
    assert arrays.mismatch(trainer, rollout) == mismatch_sums(*tensors, all_rows).finalize()
    assert arrays.ratio_quantiles(trainer, rollout, 500) == ratio_quantiles(ratio_sample(*tensors, all_rows, 500))
