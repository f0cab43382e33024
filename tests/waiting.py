"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Returns once the condition holds; the test fails where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """False also for a zombie, which has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
