"""The registry of metrics and its reference page."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.telemetry.metrics import (
    METRICS,
    SCORERS,
    agent_reward_metric,
    check_metrics,
    failed_reward_metric,
    is_reward_name,
    named_reward_metric,
    reference_table,
    table_metrics,
)

ROOT = Path(__file__).parents[3]


def test_the_reference_table_is_current():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"\n\n{reference_table()}\n\n" in page, "put into it: python -m moerl.telemetry.metrics"


def test_every_metric_has_a_unit_and_one_line_of_meaning():
    for metric in METRICS.values():
        assert metric.unit
        assert metric.meaning
        assert "\n" not in metric.meaning


def test_every_metric_is_on_the_reference_table():
    page = reference_table()
    for name in METRICS:
        parts = name.split("/")
        listed = f"mismatch/<scorer>/{parts[2]}" if len(parts) == 3 and parts[1] in SCORERS else name
        if parts[0] == "turn":
            listed = f"turn/<n>/{parts[2]}"
        assert f"`{listed}`" in page


def test_a_name_that_is_not_registered_is_refused():
    with pytest.raises(ValueError, match="'reward/maen' is not registered"):
        check_metrics({"reward/maen": 1.0})


@pytest.mark.parametrize("name", ["format", "format_reward", "math.v2", "länge", "a" * 64])
def test_a_named_reward_of_a_task_has_a_metric(name: str):
    assert is_reward_name(name)
    check_metrics({named_reward_metric(name): 0.5})


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a\n", "\x1b[2J", "a" * 65])
def test_a_name_that_no_metric_can_have_is_refused(name: str):
    assert not is_reward_name(name)
    with pytest.raises(ValueError, match="is not registered"):
        check_metrics({named_reward_metric(name): 0.5})


def test_named_rewards_are_on_the_reference_table():
    assert "`reward/<name>/mean`" in reference_table()
    assert "`reward/<name>/failed`" in reference_table()


def test_the_reward_of_an_agent_has_a_metric_apart_from_rewards_by_name():
    check_metrics({agent_reward_metric("checker"): 0.5, named_reward_metric("agent"): 0.5})
    assert agent_reward_metric("mean") != named_reward_metric("agent")
    for name in (agent_reward_metric("a/b"), agent_reward_metric(""), "reward/agent/checker"):
        with pytest.raises(ValueError, match="is not registered"):
            check_metrics({name: 0.5})


def test_what_a_reward_failed_on_has_a_metric():
    check_metrics({failed_reward_metric("math.v2"): 3.0, failed_reward_metric(""): 1.0})
    with pytest.raises(ValueError, match="is not registered"):
        check_metrics({"reward/a b/failed": 3.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None])
def test_a_value_that_is_no_finite_number_is_refused(value: object):
    with pytest.raises(ValueError, match="expected a finite number"):
        check_metrics({"reward/mean": value})  # type: ignore[dict-item]


def test_times_and_memory_are_not_part_of_what_equal_runs_share():
    names = ("reward/mean", "seconds/step", "memory/peak_rss_bytes")
    assert [METRICS[name].deterministic for name in names] == [True, False, False]


def test_a_mismatch_table_becomes_registered_metrics():
    row = table_metrics({"both": {"mismatch/k3": 1.0}, "neither": {"mismatch/logprob_abs_mean": 2.0}})
    assert row == {"mismatch/both/k3": 1.0, "mismatch/neither/logprob_abs_mean": 2.0}
    check_metrics(row)
