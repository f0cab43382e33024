"""Signals that ask a run to stop: TERM, HUP and USR1, as schedulers send them before they kill. Torch-free.

The first one is remembered until the run reaches a safe point; further ones change nothing, because schedulers send
several. Ctrl-C is not among them: it ends a run at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOPPED = 75
"""Exit status of a run that was told to stop and can go on: EX_TEMPFAIL, which schedulers requeue."""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class _StopNow(BaseException):
    """Ends the work that `StopRequest.unless_stopped` does."""


class StopRequest:
    """Whether this process was told to stop.

    Attributes:
        signal: name of the first stop signal, empty before.
    """

    def __init__(self) -> None:
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
            return
        self.signal = signal.Signals(number).name
        # Not print: the signal may have come in the midst of one.
        os.write(2, f"{self.signal}: stopping at the next safe point; Ctrl-C stops at once\n".encode())
        if self._ends_work:
            raise _StopNow


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Receives stop signals while the context is open; those that the process ignores, as under nohup, stay ignored.

    Call from the main thread.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, request.receive)
    try:
        yield request
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
