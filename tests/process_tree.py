"""Processes that a process has started, as the kernel says (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path


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
    """Sends signals to processes, as the stop of a cgroup does. This one gets its own when all are sent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        for pid in pids:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
