"""Processes that a process has started, as the kernel says (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from moerl.processes.spared import STOP_SIGNALS


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, by whichever of its threads and in whatever session, and theirs."""
    try:
        children = [int(each) for file in threads_of(pid) for each in (file / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield child
        yield from descendants(child)


def threads_of(pid: int) -> list[Path]:
    folder = Path(f"/proc/{pid}/task")
    return [folder / thread for thread in os.listdir(folder)]


def family(pid: int) -> list[int]:
    """A process and its descendants, those that were started last first."""
    return [*reversed([*descendants(pid)]), pid]


def tell_all(pids: Sequence[int], numbers: Sequence[signal.Signals]) -> None:
    """Sends signals to processes, as the stop of a cgroup does. Where this is one of them, and its handler raises, the
    others come nonetheless."""

    def tell() -> None:
        for pid in pids:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()


@contextlib.contextmanager
def signals_to_children() -> Iterator[None]:
    """Sends all stop signals to all processes that are started meanwhile, again and again."""
    before, is_over = {*descendants(os.getpid())}, threading.Event()

    def tell() -> None:
        while not is_over.wait(0.02):
            for pid in [*descendants(os.getpid())]:
                for number in () if pid in before else STOP_SIGNALS:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
