"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from moerl.config.stop_signals import SIGNALS, StopRequest, stop_signals


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with stop_signals() as request:
        yield request


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_remembered_and_said(
    number: signal.Signals, stop: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    for each in (number, *(each for each in SIGNALS if each is not signal.SIGINT)):
        os.kill(os.getpid(), each)
    assert stop.signal == number.name
    again = " again" if number is signal.SIGINT else ""
    assert capfd.readouterr().err == f"{number.name}: stopping at the next safe point; Ctrl-C{again} stops at once\n"


@pytest.mark.parametrize("number", SIGNALS)
def test_ctrl_c_after_a_signal_stops_at_once(number: signal.Signals, stop: StopRequest) -> None:
    os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_work_that_may_be_left_off_ends_at_once(stop: StopRequest) -> None:
    def work() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
        return 1

    assert stop.unless_stopped(work) is None
    assert stop.unless_stopped(lambda: 1) is None


def test_work_is_done_where_no_signal_comes(stop: StopRequest) -> None:
    assert stop.unless_stopped(lambda: 1) == 1


def test_other_work_is_not_disturbed(stop: StopRequest) -> None:
    stop.unless_stopped(lambda: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.signal == "SIGUSR1"


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal == ""
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_afterwards_signals_do_what_they_did() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_signals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
