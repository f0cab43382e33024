"""Stop signals that children of a run are spared from (`moerl.processes.host`). Standard library alone."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
"""Ctrl-C, and the signals that schedulers send before they kill."""


@contextlib.contextmanager
def sparing() -> Iterator[None]:
    """Blocks stop signals in this thread, and so in processes that it starts meanwhile; this thread gets them at the
    end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignores stop signals in this process and in those that it starts. If they were only blocked, they would come when
    a library changes the mask, as Python's `multiprocessing` does. Call from the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
