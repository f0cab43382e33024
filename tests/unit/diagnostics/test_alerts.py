"""Alerts from the rows of a run."""

from __future__ import annotations

import pytest

from moerl.diagnostics.alerts import WINDOW, Announcer, active_alerts


def rows(metric: str, values: list[float]) -> list[dict[str, object]]:
    return [{"stage": "rl", "step": step, metric: value} for step, value in enumerate(values, start=1)]


def kinds(metric: str, values: list[float]) -> list[str]:
    return [alert.kind for alert in active_alerts(rows(metric, values))]


def test_a_run_without_steps_has_no_alert():
    assert active_alerts([]) == []
    assert active_alerts([{"stage": "sft", "step": 1, "sft/loss": 1.0}]) == []


def test_a_gap_that_doubles_above_the_floor_is_alarming():
    metric = "mismatch/logprob_abs_mean"
    assert kinds(metric, [2e-3] * WINDOW + [5e-3] * WINDOW) == ["gap"]
    (alert,) = active_alerts(rows(metric, [2e-3] * WINDOW + [5e-3] * WINDOW))
    assert "from 2.0e-03 to 5.0e-03 nats" in str(alert)
    assert kinds(metric, [4e-3] * WINDOW + [5e-3] * WINDOW) == []
    assert kinds(metric, [1e-7] * WINDOW + [1e-3] * WINDOW) == []
    assert kinds(metric, [1e-7] * (WINDOW - 1) + [1.0] * WINDOW) == []


def test_single_steps_do_not_make_a_gap():
    assert kinds("mismatch/logprob_abs_mean", [2e-3] * WINDOW + [2e-3, 9.0, 2e-3, 9.0, 2e-3]) == []


def test_live_rows_that_appear_or_rise_are_alarming_until_they_are_gone():
    metric = "routing/live_rows"
    assert kinds(metric, [0.0] * 6) == []
    assert kinds(metric, [0.0, 0.0, 3.0]) == ["coverage"]
    assert kinds(metric, [5.0]) == ["coverage"]
    assert kinds(metric, [0.0, 3.0, 0.0]) == []


def test_an_engine_that_never_captures_some_rows_is_alarming_once_and_again_where_they_rise():
    metric = "routing/live_rows"
    assert kinds(metric, [10.0, 12.0, 11.0, 10.0, 12.0, 11.0]) == []
    assert kinds(metric, [10.0, 12.0, 11.0, 10.0, 12.0, 40.0]) == ["coverage"]


def test_refused_trajectories_are_alarming_for_a_window():
    metric = "quarantine/count"
    assert kinds(metric, [0.0, 0.0, 2.0]) == ["quarantine"]
    assert kinds(metric, [3.0]) == ["quarantine"]
    assert kinds(metric, [0.0, 2.0] + [2.0] * (WINDOW - 1)) == ["quarantine"]
    assert kinds(metric, [0.0, 2.0] + [2.0] * WINDOW) == []


def test_counts_of_before_a_window_are_no_news():
    late = [{"stage": "rl", "step": 70 + i, "quarantine/count": 9.0} for i in range(12)]
    assert active_alerts(late) == []


@pytest.mark.parametrize(("share", "found"), [(0.1, []), (0.11, ["far tokens"])])
def test_many_tokens_apart_by_a_factor_of_two_are_alarming(share: float, found: list[str]):
    assert kinds("mismatch/share_above_ln2", [0.0, share]) == found


def test_an_alert_is_said_once_until_it_clears():
    announcer = Announcer()
    alarming, calm = active_alerts(rows("routing/live_rows", [3.0])), []
    said = [len(announcer.new(active)) for active in (alarming, alarming, calm, alarming)]
    assert said == [1, 0, 0, 1]
