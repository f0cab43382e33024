"""Hosts of the runs of a sweep: a protocol, and its implementation for this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moerl.processes.host import Process, end, start_logged

_PROGRAM = """
import sys
from moerl.processes.parent import die_with
die_with(int(sys.argv.pop(1)))
from moerl.cli import main
sys.exit(main())
"""
LOCAL_PROGRAM = (sys.executable, "-P", "-c", _PROGRAM)
"""Start of `moerl` as a process that dies with its parent; the parent's pid and the command line follow."""


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One run to start."""

    name: str
    """Name that no other run of the sweep has."""
    arguments: Sequence[str]
    """Arguments of `moerl`; they go on with the run if it was started before, so a job may be started again."""
    log: Path
    """File for what the run prints, behind what is there."""


class RunHost(Protocol):
    """Host of runs. The sweep calls it from one thread, and alone decides which runs it starts."""

    slots: int
    """Number of runs that may be under way at the same time, 1 at least."""

    def start(self, job: SweepJob) -> None:
        """Starts a run, or queues it to be started, and returns at once. Raises OSError if it cannot be started."""

    def ended(self) -> dict[str, int]:
        """Returns the exit statuses of the runs that ended since the last call, by name of the job; a negative one is
        the signal that killed the run. Does not wait."""
        ...

    def stop(self, number: signal.Signals) -> None:
        """Passes a stop signal on to all runs under way; `ended` returns each when it is gone."""

    def close(self) -> None:
        """Kills the runs that are still under way; afterwards nothing of the sweep runs here."""


class LocalHost:
    """Host that starts runs as child processes on this machine; implements `RunHost`.

    Args:
        jobs: number of runs at the same time.
        program: command line, which the pid of this process and the arguments of a job follow.
    """

    def __init__(self, jobs: int, program: Sequence[str] = LOCAL_PROGRAM) -> None:
        self.slots, self._program = jobs, program
        self._processes: dict[str, Process] = {}

    def start(self, job: SweepJob) -> None:
        command = [*self._program, str(os.getpid()), *job.arguments]
        # Ctrl-C comes here alone, and `stop` passes it on.
        self._processes[job.name] = start_logged(command, job.log, is_spared=False)

    def ended(self) -> dict[str, int]:
        found = {name: status for name, each in self._processes.items() if (status := each.poll()) is not None}
        for name in found:
            del self._processes[name]
        return found

    def stop(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            end(process)
        self._processes.clear()
