"""Signals that ask a run to stop: Ctrl-C, and TERM, HUP and USR1, as schedulers send them before they kill. Torch-free.

The first one is remembered until the run reaches a safe point; further ones change nothing, because schedulers send
several. Ctrl-C after any of them ends the run at once, as the end of the grace time does, unless it came together with
another signal: a program that sends both to a whole job is no person who waits.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from moerl.processes.spared import STOP_SIGNALS

STOPPED = 75
"""Exit status of a run that a signal stopped and that can go on: EX_TEMPFAIL, which schedulers requeue."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

TOGETHER_SECONDS = 1.0
"""Longest time between Ctrl-C and another signal that count as one request, by the other signal."""


class GraceOverError(BaseException):
    """End of the grace time: the run ends at once, whatever it is doing."""


class _StopNow(BaseException):
    """End of the work that `StopRequest.unless_stopped` does."""


class StopRequest:
    """Request to stop that this process may have got.

    Attributes:
        signal: name of the first stop signal, or of the one that came together with Ctrl-C; empty before.
        grace_seconds: time from the first signal to `GraceOverError`; None = without end.
    """

    def __init__(self) -> None:
        self.grace_seconds: float | None = None
        self.signal = ""
        self._since = math.inf
        self._ends_work, self._is_over = False, False

    def unless_stopped[T](self, work: Callable[[], T]) -> T | None:
        """Returns the result of `work`, which a stop signal ends at once; None if a signal came before it was done.

        Call from the main thread, with work that may be stopped at any point. An error of work that a signal ends is
        said, not raised: it comes of the end, or comes again.
        """
        try:
            try:
                self._ends_work = True
                return None if self.signal else work()
            finally:
                self._ends_work = False
        except _StopNow:
            self._ends_work = False
        except Exception as error:
            if not self.signal:
                raise
            # Or C code put it in the place of that of the signal, as numpy does if Python code that it calls is ended.
            os.write(2, f"the work that {self.signal} ended failed: {type(error).__name__}: {error}\n".encode())
        return None

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Handles a stop signal. Runs in the main thread."""
        if self.signal:
            self._receive_another(number)
            return
        # No call since the question, in which another signal could come.
        self.signal = signal.Signals(number).name
        again = " again" if number == signal.SIGINT else ""
        within = "" if self.grace_seconds is None else f", within {self.grace_seconds:g} s"
        # Not print: the signal may have come in the midst of one.
        os.write(2, f"{self.signal}: stopping at the next safe point{within}; Ctrl-C{again} stops at once\n".encode())
        # Not before: a busy disk can hold the message up for seconds.
        self._since = time.monotonic()
        if self.grace_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, self.grace_seconds)
        if self._ends_work:
            raise _StopNow

    def _receive_another(self, number: int) -> None:
        are_two = (number == signal.SIGINT) != (self.signal == "SIGINT")
        if are_two and time.monotonic() - self._since < TOGETHER_SECONDS:
            self.signal = self.signal if number == signal.SIGINT else signal.Signals(number).name
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def within(self, grace_seconds: float | None) -> Iterator[None]:
        """Raises `GraceOverError` in the main thread this long after the first signal, or from now on if that has come.
        grace_seconds: None = never."""
        if grace_seconds is None:
            yield
            return
        before = signal.signal(signal.SIGALRM, self.end_grace)
        self.grace_seconds = grace_seconds
        if self.signal:
            signal.setitimer(signal.ITIMER_REAL, grace_seconds)
        try:
            yield
        except Exception as error:
            if not self._is_over:
                raise
            # As in `unless_stopped`.
            raise GraceOverError from error
        finally:
            self.grace_seconds = None
            if self.signal:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def end_grace(self, number: int, frame: FrameType | None = None) -> None:
        """Handles the timer: ends the run. Runs in the main thread.

        Raises:
            GraceOverError: always.
        """
        self._is_over = True
        os.write(2, b"the grace time is over: stopping at once\n")
        raise GraceOverError


@contextlib.contextmanager
def stop_signals(*, for_good: bool = False) -> Iterator[StopRequest]:
    """Receives stop signals while the context is open; those that the process ignores, as under nohup, stay ignored.

    Call from the main thread.

    Args:
        for_good: the process ends after this. If it got a stop signal, it then ignores all further ones but Ctrl-C.
    """
    request = StopRequest()
    taken = {number: handler for number in STOP_SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, request.receive)
    try:
        yield request
    finally:
        for number, handler in taken.items():
            is_over = for_good and request.signal and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_over else handler)
