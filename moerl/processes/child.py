"""A Python process of this run on this machine, and our end of its socket. Torch-free.

The process dies with the one that started it, and no stop signal reaches it (`moerl.processes.host`). Messages:
`moerl.processes.channel`. Its program serves within `moerl.processes.parent.connected`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moerl.processes.channel import receive, send
from moerl.processes.host import end, start_logged, wait_for
from moerl.processes.parent import child_environment


def module_program(name: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module of this environment."""
    # -P: a torch.py or json.py in the user's directory is not what we import.
    return (sys.executable, "-P", "-m", name, *arguments)


class Child:
    """A process and our end of its socket.

    Args:
        program: command; the descriptor of the process's socket is added as an argument, then those in `given`.
        log: file that the output is appended to; its folder is made. None = the standard error of this process.
        environment: of the process; None = that of this process.
        given: descriptors to inherit, also named in the command.
        inherited: descriptors to inherit that the command does not name.
    """

    def __init__(
        self,
        program: Sequence[str],
        log: Path | None,
        environment: Mapping[str, str] | None = None,
        *,
        given: Sequence[int] = (),
        inherited: Sequence[int] = (),
    ) -> None:
        self.log = log
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_logged(
                [*program, *map(str, (theirs.fileno(), *given))],
                log,
                env=child_environment(environment),
                pass_fds=(theirs.fileno(), *given, *inherited),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Sends a message; returns the reply and its frame.

        Raises:
            TimeoutError: the process is silent for `seconds`.
            EOFError: the process has closed its connection.
            OSError: the process is gone.
        """
        self.socket.settimeout(seconds)
        send(self.socket, message)
        return self.receive(seconds)

    def receive(self, seconds: float) -> tuple[bytes, bytes]:
        """Returns the next message and its frame. Raises as `ask` does."""
        self.socket.settimeout(seconds)
        return receive(self.socket)

    def wait(self, seconds: float) -> None:
        """Waits for the end of the process; kills it if that takes longer."""
        if wait_for(self._process, seconds) is None:
            self.kill()

    def kill(self) -> None:
        end(self._process)

    def release(self) -> None:
        """Closes our end of the socket, and removes a log without output. A second call does nothing."""
        self.socket.close()
        if self.log is not None:
            remove_empty(self.log)

    def describe_end(self, seconds: float) -> str:
        """Waits up to `seconds` for the end of the process; returns how it ended."""
        status = wait_for(self._process, seconds)
        if status is None:
            return "it closed its connection"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"


def describe_output(log: Path | None) -> str:
    """Returns the place of a process's output."""
    if log is None:
        return "what it printed stands above"
    return f"its output is in {log}" if log.exists() and log.stat().st_size > 0 else "it wrote nothing"


def remove_empty(log: Path) -> None:
    """Removes the log of a process that wrote nothing; one that cannot be removed does no harm."""
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()
