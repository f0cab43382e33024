"""Conclusions of the benchmark of a busy core from seconds of steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def busy_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, which finds its own modules beside it."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("busy_core")


def measured(busy_core: Any, alone: float, beside: float) -> Any:
    """Steps of both stages that take these seconds."""
    stages = ("sft", "rl")
    seconds = {(stage, loop): [beside if loop else alone] * 2 for stage in stages for loop in (False, True)}
    return busy_core.Measured(seconds)


def test_speeds_are_compared_with_the_same_run_and_with_the_nearest_baseline(busy_core: Any) -> None:
    runs = [
        ("baseline", measured(busy_core, 1.0, 20.0)),
        ("ours", measured(busy_core, 1.0, 2.0)),
        ("ours", measured(busy_core, 2.5, 5.0)),
        ("baseline", measured(busy_core, 2.0, 40.0)),
    ]
    found = {result.name: result for result in busy_core.results(runs)}
    assert found["baseline: speed beside the loop / alone"].value == pytest.approx(0.05)
    share = found["ours: speed beside the loop / alone"]
    assert (share.value, share.goal, share.holds) == (pytest.approx(0.5), ">= 0.45", True)
    # 1 / 1 in the first pair, 2 / 2.5 in the second.
    alone = found["ours: demo alone, speed / baseline's"]
    assert (alone.value, alone.goal, alone.holds) == (pytest.approx(0.9), ">= 0.97", False)
    assert found["ours: demo beside the loop, speed / baseline's"].value == pytest.approx(9.0)


def test_the_plan_has_steps_for_every_window(busy_core: Any) -> None:
    for plan in (busy_core.FULL, busy_core.QUICK):
        for stage, steps in plan.steps.items():
            assert plan.total(stage) > plan.windows * (steps + 1)
