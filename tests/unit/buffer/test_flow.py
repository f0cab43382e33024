"""Ages, waste and idle time between two batches."""

from __future__ import annotations

from moerl.buffer.flow import Flow, age_metrics
from moerl.telemetry.metrics import check_metrics


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_engines_wait_while_no_group_is_sampled() -> None:
    clock = Clock()
    flow = Flow(clock)
    clock.now = 2.0
    flow.sampling(3)
    flow.sampling(1)
    clock.now = 8.0
    flow.sampling(0)
    flow.leave_out(40)
    flow.leave_out(2)
    clock.now = 10.0
    assert flow.lap() == {"waiting/engine_for_slots": 0.4, "tokens/left_out": 42.0}
    clock.now = 11.0
    flow.sampling(2)
    clock.now = 12.0
    assert flow.lap() == {"waiting/engine_for_slots": 0.5, "tokens/left_out": 0.0}
    clock.now = 13.0
    assert flow.lap() == {"waiting/engine_for_slots": 0.0, "tokens/left_out": 0.0}


def test_a_trajectory_is_as_old_as_its_oldest_token() -> None:
    versions = [[7, 7], [6, 7, 7], [5, 6, 7], [1, 1], [-2, 7]]
    metrics = age_metrics(7, versions, histogram=True)
    check_metrics(metrics)
    assert metrics == {
        "staleness/age_max": 9.0,
        "staleness/age_mean": (0 + 1 + 2 + 6 + 9) / 5,
        "staleness/versions_max": 3.0,
        "staleness/versions_mean": (1 + 2 + 3 + 1 + 2) / 5,
        "staleness/age_0": 0.2,
        "staleness/age_1": 0.2,
        "staleness/age_2": 0.2,
        "staleness/age_3": 0.0,
        "staleness/age_4_to_7": 0.2,
        "staleness/age_8_up": 0.2,
    }
    assert not any("age_0" in name for name in age_metrics(7, versions, histogram=False))
