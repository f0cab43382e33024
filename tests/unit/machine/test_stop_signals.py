"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest

from moerl.machine import stop_signals as stop_signals_module
from moerl.machine.stop_signals import GraceOverError, StopRequest, stop_signals
from moerl.processes.spared import STOP_SIGNALS


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    # Those that the tests were started with may be ignored, as under nohup.
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    with stop_signals() as request:
        yield request
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_remembered_and_said(
    number: signal.Signals, stop: StopRequest, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals_module, "TOGETHER_SECONDS", 0.0)
    for each in (number, *(each for each in STOP_SIGNALS if each is not signal.SIGINT)):
        os.kill(os.getpid(), each)
    assert stop.signal == number.name
    again = " again" if number is signal.SIGINT else ""
    assert capfd.readouterr().err == f"{number.name}: stopping at the next safe point; Ctrl-C{again} stops at once\n"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_ctrl_c_after_a_signal_stops_at_once(
    number: signal.Signals, stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals_module, "TOGETHER_SECONDS", 0.0)
    os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_ctrl_c_together_with_another_signal_is_the_other_signal(
    numbers: tuple[signal.Signals, ...], stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals_module, "TOGETHER_SECONDS", 600.0)
    for number in numbers:
        os.kill(os.getpid(), number)
    assert stop.signal == "SIGTERM"


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_a_signal_that_comes_while_a_busy_disk_holds_the_message_of_another_up_came_together_with_it(
    numbers: tuple[signal.Signals, ...], stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals_module, "TOGETHER_SECONDS", 0.0)
    monkeypatch.setattr(stop_signals_module.os, "write", lambda *_: os.kill(os.getpid(), numbers[1]))
    os.kill(os.getpid(), numbers[0])
    assert stop.signal == "SIGTERM"


def test_ctrl_c_twice_stops_at_once_however_fast(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("is_told_before", [True, False])
def test_the_grace_time_begins_with_the_signal_or_when_it_is_known(is_told_before: bool, stop: StopRequest) -> None:
    def work(*, is_told: bool) -> None:
        with stop.within(0.01):
            if is_told:
                os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)

    handler = signal.getsignal(signal.SIGALRM)
    if is_told_before:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(GraceOverError):
        work(is_told=not is_told_before)
    assert signal.getsignal(signal.SIGALRM) is handler
    with stop.within(None):
        assert signal.getsignal(signal.SIGALRM) is handler


def test_the_grace_time_ends_work_in_which_another_error_takes_the_place_of_its_end(stop: StopRequest) -> None:
    def as_in_c() -> None:
        try:
            threading.Event().wait(60)
        except GraceOverError:
            raise TypeError("of the library") from None

    with pytest.raises(TypeError, match="before"), stop.within(60):
        raise TypeError("before")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(GraceOverError), stop.within(0.01):
        as_in_c()


@pytest.mark.parametrize(("is_told", "status"), [(True, 75), (False, -signal.SIGTERM)])
def test_a_signal_after_the_end_of_a_run_that_was_told_to_stop_changes_its_status_no_more(
    is_told: bool, status: int
) -> None:
    program = f"""
import os, signal, sys
from moerl.machine.stop_signals import STOPPED, stop_signals
with stop_signals(for_good=True):
    if {is_told}:
        os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGHUP)
sys.exit(STOPPED)
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == status


def test_work_that_may_be_left_off_ends_at_once(stop: StopRequest) -> None:
    def work() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
        return 1

    assert stop.unless_stopped(work) is None
    assert stop.unless_stopped(lambda: 1) is None


def test_work_in_which_numpy_puts_an_error_of_its_own_in_the_place_of_the_signals_ends_too(
    stop: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    ids = np.array([[1, 2], [3, 4]])

    def tell(frame: FrameType, event: str, _: object) -> None:
        # A function of Python that numpy calls from C, and in which signals are handled.
        if frame.f_code.co_name == "_promote_fields":
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGTERM)

    def work() -> int:
        sys.setprofile(tell)
        return len(np.unique(ids, axis=0))

    assert stop.unless_stopped(work) is None
    assert "the work that SIGTERM ended failed: TypeError: Cannot compare structured arrays" in capfd.readouterr().err


def test_an_error_of_work_that_no_signal_ends_is_raised(stop: StopRequest) -> None:
    with pytest.raises(ZeroDivisionError):
        stop.unless_stopped(lambda: 1 // 0)


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
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with stop_signals():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
