"""Every objective, correction and reduction trains in every layout as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import numpy as np
import pytest
import tiny_moe
from matrix import Case
from policy_rows import PRESETS, facts_of_presets, preset
from ranks import Ranks

from moerl.algorithms.arrays import sampled_tokens
from moerl.contract.batch import BatchTotals

pytestmark = pytest.mark.timeout(900)

CASES = [
    pytest.param(Case(2, {"context": 2}), id="CP2", marks=pytest.mark.slow),
    pytest.param(Case(2, {"tensor": 2}), id="TP2", marks=pytest.mark.distributed),
    pytest.param(Case(2, {"expert": 2}), id="EP2", marks=pytest.mark.distributed),
    pytest.param(Case(4, {"context": 2, "tensor": 2}, "full"), id="CP2-TP2", marks=pytest.mark.distributed),
]
COVARIANCE = {"cov_share": 0.2}
BANDS = {"sequence_band": 12.0, "opsm_delta": 1.5}
ALGORITHMS = {
    **{name: (name, {}) for name in PRESETS},
    "grpo, sequence mean, sequence weights": ("grpo", BANDS | {"reduction": "sequence_mean", "importance": "sequence"}),
    "cispo, constant": ("cispo", BANDS | {"reduction": "constant", "reduction_length": 9}),
}


def train(layout: Any, path: Path, case: Case) -> dict[str, tuple[float, float, dict[str, np.ndarray]]]:
    """By algorithm, the loss of this rank, the norm of the gradient, and the weights after one step."""
    found = {}
    for title, (name, changes) in ALGORITHMS.items():
        trainer, samples = matrix.build(layout, path, case), matrix.make_samples(201)
        batches, num_tokens = tiny_moe.shares(trainer, samples, uncaptured="live")
        totals = BatchTotals(num_tokens, float(len(samples)), facts_of_presets(sampled_tokens(samples), **COVARIANCE))
        changes = changes | (COVARIANCE if name.endswith("_cov") else {})
        loss = tiny_moe.policy_loss(trainer, batches, num_tokens, totals=totals, algorithm=preset(name, **changes))
        report = trainer.step(batches, loss, enforce=True)
        rows = report.rows if tiny_moe.speaks(trainer) else []
        part = sum(float(row.losses_T.double().sum()) for row in rows if row.losses_T is not None)
        found[title] = (part, report.update.grad_norm, tiny_moe.exported(trainer))
    return found


@pytest.fixture(scope="module")
def one(untied: Path, one_process: Ranks) -> dict[str, Any]:
    return one_process.run(train, untied, Case(1))[0]


@pytest.mark.parametrize("case", CASES)
def test_steps_of_every_algorithm_equal_those_of_one_process(
    case: Case, untied: Path, processes: Any, one: dict[str, Any]
) -> None:
    ranks = processes(case.processes).run(train, untied, case, **case.sizes)
    for title, (loss, grad_norm, weights) in one.items():
        assert sum(rank[title][0] for rank in ranks) == pytest.approx(loss, abs=1e-4), title
        assert ranks[0][title][1] == pytest.approx(grad_norm, rel=1e-4), title
        assert tiny_moe.largest_difference(ranks[0][title][2], weights) < 1e-6, title


@pytest.mark.slow
def test_the_algorithms_are_not_the_same(one: dict[str, Any]) -> None:
    norms = {title: round(found[1], 6) for title, found in one.items()}
    assert len(set(norms.values())) >= 6, norms
    assert min(norms.values()) > 1e-3, norms
