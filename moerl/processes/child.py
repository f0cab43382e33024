"""A Python process of this run on this machine, and our end of its socket. Torch-free.

The process dies with the one that started it, and no stop signal reaches it (`moerl.processes.spared`). Messages:
`moerl.processes.channel`. Its program begins with `belong_to_parent`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moerl.processes.parent import child_environment
from moerl.processes.spared import start_spared


def module_program(name: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module of this environment."""
    # -P: a torch.py or json.py in the user's directory is not what we import.
    return (sys.executable, "-P", "-m", name, *arguments)


class Child:
    """A process and our end of its socket.

    Args:
        program: command; the descriptor of the process's socket is added as an argument, then those in `given`.
        log: file that the output is appended to; its folder is made.
        environment: of the process; None = that of this process.
        given: descriptors to inherit, also named in the command.
        inherited: descriptors to inherit that the command does not name.
    """

    def __init__(
        self,
        program: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        given: Sequence[int] = (),
        inherited: Sequence[int] = (),
    ) -> None:
        self.log = log
        self.socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            self._process = start_spared(
                [*program, *map(str, (theirs.fileno(), *given))],
                env=child_environment(environment),
                pass_fds=(theirs.fileno(), *given, *inherited),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> None:
        """Waits for the end of the process; kills it if that takes longer."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Closes our end of the socket, and removes a log without output. A second call does nothing."""
        self.socket.close()
        remove_empty(self.log)

    def describe_end(self, seconds: float) -> str:
        """Waits up to `seconds` for the end of the process; returns how it ended."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"


def describe_output(log: Path) -> str:
    """Returns the place of a process's output."""
    return f"its output is in {log}" if log.exists() and log.stat().st_size > 0 else "it wrote nothing"


def remove_empty(log: Path) -> None:
    """Removes the log of a process that wrote nothing; one that cannot be removed does no harm."""
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()
