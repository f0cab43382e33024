"""Fewer points and columns: what must not be lost."""

from __future__ import annotations

import pytest

from moerl.diagnostics.report.data import LayerMap, ReportStep
from moerl.diagnostics.report.thinning import joined_columns, thinned_points, thinned_steps

LIMIT = 400


def test_thinning_keeps_both_ends_and_every_spike() -> None:
    values = [1.0] * 10_000
    values[4321], values[7654] = 50.0, -3.0
    points = thinned_points(values, LIMIT)
    assert len(points) <= LIMIT
    assert {0, 4321, 7654, 9_999} <= {*points}
    assert points == sorted(points)


def test_each_metric_keeps_its_own_steps() -> None:
    steps = [
        ReportStep(
            n, {"a": 9.0 if n == 700 else 1.0, "b": -9.0 if n == 801 else 1.0} | ({"rare": 2.0} if n % 50 == 0 else {})
        )
        for n in range(1, 2001)
    ]
    kept = thinned_steps(steps, 100)
    by_metric = {name: {s.step: s.metrics[name] for s in kept if name in s.metrics} for name in ("a", "b", "rare")}
    assert by_metric["a"][700] == 9.0
    assert by_metric["b"][801] == -9.0
    assert len(by_metric["a"]) <= 100
    assert sorted(by_metric["rare"]) == list(range(50, 2001, 50))
    assert [step.step for step in kept] == sorted(step.step for step in kept)


def test_a_short_run_keeps_every_step() -> None:
    steps = [ReportStep(n, {"a": float(n)}) for n in range(LIMIT)]
    assert thinned_steps(steps, LIMIT) == tuple(steps)


def test_joined_columns_are_means_of_rows_that_are_there() -> None:
    each = LayerMap("step", tuple(map(str, range(1, 7))), ((0.0, 1.0, 2.0, None, None, None), (1.0,) * 6))
    joined = joined_columns(each, 3)
    assert joined.columns == ("1 to 2", "3 to 4", "5 to 6")
    assert joined.differing == ((0.5, 2.0, None), (1.0, 1.0, 1.0))
    assert joined_columns(joined, 3) is joined


@pytest.mark.parametrize("columns", [("0 to 7", "8 to 15", "16 to 31", "32 to 63"), ("0", "7 to 9", "10", "63")])
def test_groups_of_ranges_are_named_by_their_ends(columns: tuple[str, ...]) -> None:
    joined = joined_columns(LayerMap("position", columns, ((0.1, 0.1, 0.3, 0.3),)), 1)
    assert joined.columns == ("0 to 63",)
    assert joined.differing[0][0] == pytest.approx(0.2)
