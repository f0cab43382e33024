"""Goals of a GPU: met, missed, or not measured with the reason."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("_gpu_goals")


@pytest.fixture
def outcomes(goals: Any) -> list[Any]:
    """Makes outcomes of three checks: one that measured, one that failed without results, one that was not run."""
    checks, report = importlib.import_module("_gpu_checks"), importlib.import_module("_report")
    results = [report.Result("fast: time", 0.0011), report.Result("slow: time", 0.0022), report.Result("share", 0.3)]
    return [
        checks.Outcome("measured", "passed", findings=checks.Findings(results)),
        checks.Outcome("broken", "FAILED", reason="ended by SIGSEGV"),
        checks.Outcome("late", "not run", reason="no time left"),
    ]


def test_a_goal_is_met_or_missed_by_its_comparison_its_unit_and_the_result_it_is_divided_by(
    goals: Any, outcomes: list[Any]
) -> None:
    asked = [
        goals.Goal("in ms", "<=", 1.2, "ms", "measured", "fast", scale=1e3),
        goals.Goal("too slow", "<=", 1.2, "ms", "measured", "slow", scale=1e3),
        goals.Goal("by another", "<=", 0.5, "ratio", "measured", "fast", "slow"),
        goals.Goal("at least", ">=", 0.31, "ratio", "measured", "share"),
        goals.Goal("exactly", "==", 0.3, "ratio", "measured", "share"),
    ]
    found = goals.score(outcomes, "cuda", asked)
    assert [each.state for each in found] == ["met", "missed", "met", "missed", "met"]
    assert [each.measured for each in found] == pytest.approx([1.1, 2.2, 0.5, 0.3, 0.3])


def test_a_goal_that_was_not_measured_says_why(goals: Any, outcomes: list[Any]) -> None:
    named = [("broken", "x"), ("late", "x"), ("other", "x"), ("measured", "memory")]
    found = goals.score(outcomes, "cuda", [goals.Goal("a goal", "<=", 1, "s", *each) for each in named])
    assert [(each.state, each.measured) for each in found] == [("not measured", None)] * 4
    assert [each.reason for each in found] == [
        "check broken FAILED: ended by SIGSEGV",
        "check late not run: no time left",
        "check other was not asked for",
        "check measured has no result 'memory'",
    ]


def test_every_goal_gets_a_line_with_what_was_measured_or_why_nothing_was(
    goals: Any, outcomes: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        goals.Goal("kept scoring", "<=", 1.2, "ms", "measured", "fast", scale=1e3),
        goals.Goal("share of peak", ">=", 0.31, "ratio", "measured", "share"),
        goals.Goal("a plain step", "<=", 1, "ratio", "late", "x"),
    ]
    goals.show(goals.score(outcomes, "cuda", asked))
    assert capsys.readouterr().out.splitlines() == [
        "goals:",
        "  met                 1.1  <= 1.2 ms       kept scoring",
        "  missed              0.3  >= 0.31 ratio   share of peak",
        "  not measured             <= 1 ratio      a plain step (check late not run: no time left)",
    ]


def test_tiny_sizes_on_a_cpu_measure_no_goal(goals: Any, outcomes: list[Any]) -> None:
    (found,) = goals.score(outcomes, "cpu", [goals.Goal("a goal", "<=", 1, "s", "measured", "share")])
    assert (found.state, found.reason) == ("not measured", "no NVIDIA device")


def test_a_goal_that_means_several_results_is_an_error(goals: Any, outcomes: list[Any]) -> None:
    results = outcomes[0].findings.results
    with pytest.raises(ValueError, match="'s' means several results: slow: time, share"):
        goals.result_of(results, "s")


def test_every_goal_belongs_to_a_check_and_stands_in_the_documentation(goals: Any) -> None:
    checks = {check.name for check in importlib.import_module("gpu_check").CHECKS}
    page = (ROOT / "docs" / "gpu_check.md").read_text(encoding="utf-8")
    for goal in goals.GOALS:
        assert goal.check in checks
        assert f"| {goal.name} | {goal.comparison} {goal.limit:g} {goal.unit} | {goal.check} |" in page
    assert page.count("| not measured |") == len(goals.GOALS)
