"""Interface of the controller to the process of an engine, and such a process on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from moerl.processes.channel import receive, send
from moerl.processes.child import Child, describe_output, module_program
from moerl.rollout.engine_process.messages import CloseEngine, encode

CLOSING_SECONDS = 10.0


class EngineProcess(Protocol):
    """The process of an engine, which dies with the controller. Messages: `moerl.rollout.engine_process.messages`."""

    host: str
    """Address at which senders of weights reach the process."""
    is_here: bool
    """True if the process, and so every sender of weights, is on this machine."""

    def send(self, message: bytes) -> None:
        """Sends a message, after those before it. Raises `OSError` if the process is gone."""

    def receive(self) -> tuple[bytes, bytes]:
        """Returns the next message of the process, and its frame. Raises `EOFError` or `OSError` if no more will come.
        Only one thread calls it."""
        ...

    def describe_end(self) -> str:
        """Returns a text that says which process it was, and how it ended."""
        ...

    def close(self) -> None:
        """Waits a while for the process, which was told to close, and ends it. A second call is harmless."""

    def release(self) -> None:
        """Gives up the connection to the process, which has ended. Called when no thread is in `receive` any more."""


class LocalProcess:
    """An `EngineProcess` on this machine.

    Args:
        log: file of its output; removed at the end if nothing was written.
        environment: of the process; None = that of this process.
    """

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.host, self.is_here = "127.0.0.1", True
        self._child = Child(module_program("moerl.rollout.engine_process.process"), log, environment)

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: bytes) -> None:
        send(self._child.socket, message)

    def receive(self) -> tuple[bytes, bytes]:
        return receive(self._child.socket)

    def describe_end(self) -> str:
        how = self._child.describe_end(CLOSING_SECONDS)
        return f"process {self.pid}: {how}; {describe_output(self._child.log)}"

    def close(self) -> None:
        self._child.wait(CLOSING_SECONDS)

    def release(self) -> None:
        self._child.release()


def dismiss(process: EngineProcess) -> None:
    """Ends a process that no engine uses."""
    with contextlib.suppress(OSError):
        process.send(encode(CloseEngine()))
    process.close()
    process.release()
