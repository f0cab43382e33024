"""Every layout trains as one process does. `python -m pytest -m distributed -rP` prints the errors of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import pytest
import tiny_moe
from matrix import Case
from ranks import Ranks

pytestmark = pytest.mark.timeout(900)

TP, PP, CP, EP = {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"expert": 2}
VPP, ETP = {"pipeline": 2, "virtual_pipeline": 2}, {"tensor": 2, "expert_tensor": 2}
SHORT = [Case(2, {}, sharding="overlap"), Case(2, ETP), Case(4, TP | PP | EP, recompute="full")]
"""The part of the matrix that `make test` runs."""
FULL = [
    Case(2, CP, recompute="selective"),
    Case(2, {}),
    Case(2, {}, recompute="full", sharding="on"),
    Case(2, TP),
    Case(2, TP, recompute="full"),
    Case(2, TP, recompute="selective", sharding="on"),
    Case(2, PP),
    Case(2, PP, recompute="full"),
    Case(2, PP, recompute="selective"),
    Case(2, VPP),
    Case(2, VPP, recompute="full"),
    Case(2, VPP, recompute="selective", sharding="overlap"),
    Case(2, EP),
    Case(2, EP, recompute="full", sharding="overlap"),
    Case(2, EP, recompute="selective", sharding="on"),
    Case(2, ETP, recompute="full", sharding="on"),
    Case(2, CP),
    Case(2, CP, recompute="full", sharding="overlap"),
    Case(4, TP | EP),
    Case(4, TP | EP, recompute="full", sharding="overlap"),
    Case(4, ETP | EP, recompute="full"),
    Case(4, PP | EP),
    Case(4, PP | EP, recompute="full", sharding="on"),
    Case(4, VPP | EP, recompute="full", sharding="overlap"),
    Case(4, CP | EP),
    Case(4, CP | EP, recompute="full", sharding="overlap"),
    Case(4, CP | TP),
    Case(4, CP | TP, recompute="full"),
    Case(4, {"tensor": 4}, recompute="full"),
    Case(4, TP | PP | EP),
    Case(8, TP | PP | EP),
    Case(8, TP | PP | EP, recompute="full", sharding="overlap"),
    Case(8, TP | VPP | EP, recompute="selective", sharding="on"),
    Case(8, TP | PP | CP | EP, recompute="full"),
]
CASES = [
    *(pytest.param(case, id=case.name) for case in SHORT),
    *(pytest.param(case, id=case.name, marks=pytest.mark.distributed) for case in FULL),
]


def train(layout: Any, path: Path, case: Case, seeds: tuple[int, ...], adam: bool) -> list[dict[str, Any]]:
    trainer = matrix.build(layout, path, case, adam=adam)
    return [matrix.step(trainer, matrix.make_samples(seed)) for seed in seeds]


@pytest.fixture(scope="module")
def one(untied: Path, one_process: Ranks) -> list[matrix.Total]:
    """The steps of one process."""
    return matrix.by_step(one_process.run(train, untied, Case(1), matrix.STEPS, False))


def advantages() -> list[float]:
    return [matrix.mean_advantage(matrix.make_samples(seed)) for seed in matrix.STEPS]


def num_captured() -> list[int]:
    samples = [matrix.make_samples(seed) for seed in matrix.STEPS]
    return [sum(int(sample.trajectory.routed.sum()) for sample in part) for part in samples]


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_one_process(case: Case, untied: Path, processes: Any, one: list[matrix.Total]) -> None:
    results = processes(case.processes).run(train, untied, case, matrix.STEPS, False, **case.sizes)
    found = matrix.by_step(results)
    print(f"| {case.name} | {matrix.errors(found, one, advantages())} |")
    matrix.assert_close(found, one, advantages())
    # Every captured row is proved once per layer and phase, whoever holds it.
    for step, captured in zip(found, num_captured(), strict=True):
        assert step.verified == captured * tiny_moe.SPEC.num_moe_layers * case.phases


def test_the_batches_mix_captured_and_uncaptured_rows_and_both_ways_of_sampling(one: list[matrix.Total]) -> None:
    trajectories = [sample.trajectory for seed in matrix.STEPS for sample in matrix.make_samples(seed)]
    captured = sum(num_captured()) / sum(len(trajectory) - 1 for trajectory in trajectories)
    assert captured == pytest.approx(0.75, abs=0.02)
    truncated = [trajectory.truncated[trajectory.sampled].mean() for trajectory in trajectories]
    assert set(truncated) == {0.0, 1.0}
    # The steps go somewhere: a trainer that stood still would agree with any other.
    assert all(step.grad_norms[0] > 0.05 for step in one)


ADAM = [Case(2, {}, sharding="overlap"), Case(4, CP | TP), Case(4, TP | PP | EP, recompute="full", sharding="on")]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ADAM, ids=[case.name for case in ADAM])
def test_steps_of_adam_equal_those_of_one_process(case: Case, untied: Path, one_process: Ranks, processes: Any) -> None:
    expected = matrix.by_step(one_process.run(train, untied, Case(1), matrix.STEPS, True))
    found = matrix.by_step(processes(case.processes).run(train, untied, case, matrix.STEPS, True, **case.sizes))
    print(f"| Adam, {case.name} | {matrix.errors(found, expected, advantages())} |")
    matrix.assert_close(found, expected, advantages())
