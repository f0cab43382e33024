"""Waiting for what other threads and processes do."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Work:
    """Seconds of a core that a process here could have had since a start; deadlines of tests count them.

    A second counts as one if there are cores for all that want to run, and as a quarter if there are four per core.
    """

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Adds the time since the last call, by the load of this moment: call often."""
        now = time.monotonic()
        self._seconds += (now - self._last) * share_of_a_core()
        self._last = now
        return self._seconds


def share_of_a_core() -> float:
    """Returns how much of a core each of those that want to run has, the caller left out."""
    runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
    return min(1.0, len(os.sched_getaffinity(0)) / max(1, runnable))


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Returns once the condition holds; the test fails if it does not within so many seconds of work."""
    work = Work()
    while not condition():
        assert work.seconds() < seconds, "gave up waiting"
        time.sleep(0.01)


def status_of(process: subprocess.Popen[Any], seconds: float) -> int:
    """Returns the exit status of a process once it has ended; the test fails if it does not within so much work."""
    eventually(lambda: process.poll() is not None, seconds)
    return process.wait()


def output_of(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Returns what a process has printed, once it has ended.

    Raises:
        subprocess.TimeoutExpired: it has not ended within so many seconds of work, and is killed.
    """
    work = Work()
    while True:
        try:
            return process.communicate(timeout=0.1)
        except subprocess.TimeoutExpired as error:
            if work.seconds() > seconds:
                process.kill()
                raise subprocess.TimeoutExpired(error.cmd, seconds, error.output, error.stderr) from None


def run_within(command: Sequence[str | Path], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command as `subprocess.run` does that captures text and checks nothing, for so many seconds of work."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **{**pipes, **options}) as process:
        output, errors = output_of(process, seconds)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def is_alive(pid: int) -> bool:
    """False also for a zombie, which has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
