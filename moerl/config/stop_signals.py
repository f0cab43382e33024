"""Signals that ask a run to stop: Ctrl-C, and TERM, HUP and USR1, as schedulers send them before they kill. Torch-free.

The first one is remembered until the run reaches a safe point; further ones change nothing, because schedulers send
several. Ctrl-C after any of them ends the run at once, as the end of the grace time does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOPPED = 75
"""Exit status of a run that was told to stop and can go on: EX_TEMPFAIL, which schedulers requeue."""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


class GraceOverError(BaseException):
    """The grace time is over: the run ends at once, from whatever it is in."""


class _StopNow(BaseException):
    """Ends the work that `StopRequest.unless_stopped` does."""


class StopRequest:
    """Whether this process was told to stop.

    Args:
        grace_seconds: from the first signal on, after which the main thread gets a `GraceOverError`; None: never.

    Attributes:
        signal: name of the first stop signal, empty before.
    """

    def __init__(self, grace_seconds: float | None = None) -> None:
        self.grace_seconds = grace_seconds
        self.signal = ""
        self._ends_work = False

    def unless_stopped[T](self, work: Callable[[], T]) -> T | None:
        """The result of `work`, which a stop signal ends at once; None where one came before it was done.

        Call from the main thread, with work that may be left off anywhere.
        """
        if self.signal:
            return None
        try:
            try:
                self._ends_work = True
                # A signal may have come since the question above.
                return None if self.signal else work()
            finally:
                self._ends_work = False
        except _StopNow:
            self._ends_work = False
            return None

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler of the stop signals."""
        if self.signal:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal = signal.Signals(number).name
        again = " again" if number == signal.SIGINT else ""
        within = "" if self.grace_seconds is None else f", within {self.grace_seconds:g} s"
        # Not print: the signal may have come in the midst of one.
        os.write(2, f"{self.signal}: stopping at the next safe point{within}; Ctrl-C{again} stops at once\n".encode())
        if self.grace_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, self.grace_seconds)
        if self._ends_work:
            raise _StopNow

    def end_grace(self, number: int, frame: FrameType | None = None) -> None:
        """The handler of the timer."""
        os.write(2, b"the grace time is over: stopping at once\n")
        raise GraceOverError


@contextlib.contextmanager
def stop_signals(grace_seconds: float | None = None) -> Iterator[StopRequest]:
    """Receives stop signals while the context is open; those that the process ignores, as under nohup, stay ignored.

    Call from the main thread.
    """
    request = StopRequest(grace_seconds)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, request.receive)
    if grace_seconds is not None:
        taken[signal.SIGALRM] = signal.signal(signal.SIGALRM, request.end_grace)
    try:
        yield request
    finally:
        if request.signal and grace_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in taken.items():
            signal.signal(number, handler)
