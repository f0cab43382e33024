"""Processes that a process has started, as the kernel says (Linux)."""

from __future__ import annotations

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


def tell_all(pid: int, numbers: Sequence[signal.Signals]) -> list[int]:
    """Sends signals to a process and all its descendants, those that were started last first, as the stop of a cgroup
    does in no order at all; who was told."""
    told = [*reversed([*descendants(pid)]), pid]
    for each in told:
        for number in numbers:
            try:
                os.kill(each, number)
            except ProcessLookupError:
                break
    return told
