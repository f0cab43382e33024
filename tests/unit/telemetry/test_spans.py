"""Seconds per part of a step."""

from __future__ import annotations

import pytest

from moerl.telemetry.metrics import check_metrics
from moerl.telemetry.spans import Stopwatch, peak_rss_bytes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_spans_of_one_name_add_up_until_the_lap():
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in (1.0, 2.0):
        with watch.span("rollout"):
            clock.now += seconds
    assert watch.lap() == {"seconds/rollout": 3.0}
    assert watch.lap() == {}


def test_a_nested_span_counts_in_both():
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.span("step"):
        clock.now += 1.0
        with watch.span("train"):
            clock.now += 2.0
    metrics = watch.lap()
    assert metrics == {"seconds/train": 2.0, "seconds/step": 3.0}
    check_metrics(metrics)


def test_a_span_that_fails_is_counted():
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.span("train"):
            clock.now += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert watch.lap() == {"seconds/train": 2.0}


def test_an_unknown_span_is_refused():
    with pytest.raises(ValueError, match="span 'trian'"), Stopwatch().span("trian"):
        pass


def test_peak_memory_is_in_bytes_and_grows_with_what_is_touched():
    before = peak_rss_bytes()
    block = bytearray(b"x") * 200_000_000
    assert before > 1_000_000
    assert peak_rss_bytes() >= before
    assert peak_rss_bytes() > len(block) // 2
