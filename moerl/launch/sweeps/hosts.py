"""Hosts of the runs of a sweep: a protocol, and its implementation for this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PROGRAM = """
import sys
from moerl.processes.parent import die_with
die_with(int(sys.argv.pop(1)))
from moerl.cli import main
sys.exit(main())
"""
LOCAL_PROGRAM = (sys.executable, "-P", "-c", _PROGRAM)
"""`moerl`, which dies with the process that started it. Gets the pid of that process, and the command line."""


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One run to start. name: no other of the sweep has it. arguments: of `moerl`; they go on with the run where there
    is one, so a job may be started again. log: gets what it prints, behind what is there."""

    name: str
    arguments: Sequence[str]
    log: Path


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended. status: of its process; negative: the signal that killed it."""

    name: str
    status: int


class RunHost(Protocol):
    """Host of runs. The sweep calls it from one thread, and alone decides which runs it starts."""

    @property
    def slots(self) -> int:
        """Runs that may be under way at the same time, 1 at least."""
        ...

    def start(self, job: SweepJob) -> None:
        """Begins a run, or hands it to whoever will, and returns at once. OSError where that is refused."""
        ...

    def ended(self) -> list[Ended]:
        """Runs that ended since the last call; does not wait."""
        ...

    def stop(self, number: signal.Signals) -> None:
        """Passes a stop signal on to all runs under way; `ended` tells when they are gone."""
        ...

    def close(self) -> None:
        """Ends at once what is still under way; afterwards nothing of the sweep runs here."""
        ...


class LocalHost:
    """Runs as child processes of this machine; implements `RunHost`.

    Args:
        jobs: that run side by side.
        program: takes the pid of this process and the arguments of a job.
    """

    def __init__(self, jobs: int, program: Sequence[str] = LOCAL_PROGRAM) -> None:
        self._jobs, self._program = jobs, program
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def slots(self) -> int:
        return self._jobs

    def start(self, job: SweepJob) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as output:
            self._processes[job.name] = subprocess.Popen(
                [*self._program, str(os.getpid()), *job.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C comes here alone, and is passed on.
                start_new_session=True,
            )

    def ended(self) -> list[Ended]:
        found = [Ended(name, status) for name, each in self._processes.items() if (status := each.poll()) is not None]
        for each in found:
            del self._processes[each.name]
        return found

    def stop(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
