"""Stop signals are the controller's alone: systemd, srun, scancel and every other stop of a cgroup send them to all
processes of a run at once, and a child that died of one would fail the run before its checkpoint is written.

So `start_spared` starts every process that a run waits for. Such a process ends when the controller says so, or with
the controller. Standard library alone.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, cast

SparedProcess = subprocess.Popen[bytes]
"""A child that `start_spared` started."""

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


def start_spared(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a child that stop signals do not reach from its first instruction on: they are blocked, and its session
    is not that of the terminal. Processes that the child starts inherit both.

    A script that cannot import this module learns from its signal mask which signals are meant.

    Args:
        options: those of `subprocess.Popen`.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with sparing():
            process = cast(
                "subprocess.Popen[bytes]", subprocess.Popen(list(command), start_new_session=True, **options)
            )
        return process
    except BaseException:
        # The handler of a signal that came meanwhile has raised: nobody will know of the child.
        if process is not None:
            process.kill()
            process.wait()
        raise


def ignore_stop_signals() -> None:
    """Ignores stop signals in this process and in those that it starts. If they were only blocked, they would come when
    a library changes the mask, as Python's `multiprocessing` does. Call from the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
