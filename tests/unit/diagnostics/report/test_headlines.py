"""Headlines of a run's page: reward, accuracy, and the mismatch gap with values to compare the gap with."""

from __future__ import annotations

from typing import Any

import pytest

from moerl.diagnostics.report.data import Headline
from moerl.diagnostics.report.of_run import report_of_run
from moerl.diagnostics.report.run_findings import RunSettings


def headlines_of(rows: list[dict[str, Any]], settings: RunSettings | None = None) -> dict[str, Headline]:
    report = report_of_run(rows, [], ("a run", "somewhere"), settings or RunSettings("rollout", True))
    assert report is not None
    return {headline.name: headline for headline in report.headlines}


def step(number: int, **metrics: float) -> dict[str, Any]:
    return {"stage": "rl", "step": number, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def evaluation(number: int, **metrics: float) -> dict[str, Any]:
    return {**step(number, **metrics), "stage": "evaluation"}


def test_the_reward_is_that_of_the_last_steps_beside_the_first() -> None:
    rows = [step(n, reward__mean=0.25 if n <= 5 else 0.75) for n in range(1, 21)]
    assert headlines_of(rows)["Reward"] == Headline(
        "Reward", "0.750", ("mean of the last 5 steps; 0.250 in the first 5",)
    )


def test_the_accuracy_is_that_on_held_out_problems_or_else_on_dev_problems() -> None:
    dev = [evaluation(0, accuracy__mean=0.2), step(1), evaluation(1, accuracy__mean=0.4)]
    assert headlines_of(dev)["Accuracy"] == Headline(
        "Accuracy", "0.400", ("greedy, dev problems, after step 1; 0.200 after step 0",)
    )
    both = [*dev[:-1], evaluation(1, accuracy__mean=0.4, heldout__accuracy=0.35)]
    assert headlines_of(both)["Accuracy"] == Headline("Accuracy", "0.350", ("greedy, held-out problems, after step 1",))


@pytest.mark.parametrize(("gap", "level"), [(0.0011, "good"), (0.03, "note"), (0.2, "fault")])
def test_the_gap_says_whether_it_is_healthy(gap: float, level: str) -> None:
    found = headlines_of([step(1, mismatch__logprob_abs_mean=gap)])["Mismatch gap"]
    assert found.level == level
    assert "healthy below 0.02 nats" in found.notes[0]


def test_the_gap_is_measured_by_its_floor() -> None:
    gaps = {"neither": 0.05, "kept_sets": 0.02, "experts": 0.035, "both": 0.004}
    table = {f"mismatch/{name}/logprob_abs_mean": gap for name, gap in gaps.items()}
    found = headlines_of([step(1, mismatch__logprob_abs_mean=0.02) | table], RunSettings("off", True))["Mismatch gap"]
    assert found.notes[1] == "5.0 times its floor: 0.004 nats remain with routing and masks kept"
    kept = headlines_of([step(1, mismatch__logprob_abs_mean=0.004) | table], RunSettings("rollout", True))
    assert kept["Mismatch gap"].notes[1] == "with nothing kept it would be 0.05 nats"
    without = headlines_of([step(1, mismatch__logprob_abs_mean=0.02)])["Mismatch gap"]
    assert not any("floor" in note for note in without.notes)


@pytest.mark.parametrize(
    ("precision", "rounding"),
    [
        ("float32", "float32 rounding of the same weights makes about 1e-07 nats"),
        ("bfloat16", "16-bit rounding makes 0.001 to 0.02 nats"),
    ],
)
def test_the_gap_is_compared_with_what_rounding_makes(precision: str, rounding: str) -> None:
    settings = RunSettings("rollout", True, precision)
    assert headlines_of([step(1, mismatch__logprob_abs_mean=0.002)], settings)["Mismatch gap"].notes[-1] == rounding


def test_what_was_not_measured_is_left_out() -> None:
    assert headlines_of([step(1)]) == {}
