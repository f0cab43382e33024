"""How the controller reaches the process of an engine, and that process on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from moerl.contract.files import discard
from moerl.processes.channel import receive, send
from moerl.processes.parent import CONTROLLER
from moerl.processes.spared import start_spared
from moerl.rollout.beside.messages import Close, encode

# -P: a torch.py or json.py in the user's directory is not what we import.
PROGRAM = (sys.executable, "-P", "-m", "moerl.rollout.beside.process")
CLOSING_SECONDS = 10.0


class EngineProcess(Protocol):
    """The process of an engine, which dies with the controller. Messages: `moerl.rollout.beside.messages`."""

    def send(self, message: bytes) -> None:
        """Hands on a message, after those before. `OSError` where the process is gone."""
        ...

    def receive(self) -> tuple[bytes, bytes]:
        """The next message of the process, and its frame. `EOFError` or `OSError` where there will be none. One thread
        calls it."""
        ...

    @property
    def host(self) -> str:
        """Address at which senders of weights reach the process."""
        ...

    @property
    def is_here(self) -> bool:
        """True if the process, and so every sender of weights, is on this machine."""
        ...

    def describe_end(self) -> str:
        """Returns a text that says which process it was, and how it ended."""
        ...

    def close(self) -> None:
        """Waits a while for the process, which was told to close, and ends it. Once more is harmless."""
        ...

    def release(self) -> None:
        """Gives up the connection to the process, which has ended. Nobody is in `receive` any more."""
        ...


class LocalProcess:
    """An `EngineProcess` on this machine.

    Args:
        log: where its output goes; removed at the end if nothing was written.
        environment: of the process; None = ours.
    """

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        self.host, self.is_here = "127.0.0.1", True
        self._socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            self._process = start_spared(
                [*PROGRAM, str(theirs.fileno())],
                env={**(os.environ if environment is None else environment), CONTROLLER: str(os.getpid())},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        send(self._socket, message)

    def receive(self) -> tuple[bytes, bytes]:
        return receive(self._socket)

    def describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSING_SECONDS)
        code = self._process.returncode
        how = "it closed its connection" if code is None else f"it ended with status {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        wrote = self._log.exists() and self._log.stat().st_size > 0
        return f"process {self._process.pid}: {how}; " + (f"its output is in {self._log}" if wrote else "no output")

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def release(self) -> None:
        self._socket.close()
        if self._log.exists() and self._log.stat().st_size == 0:
            discard(self._log)


def dismiss(process: EngineProcess) -> None:
    """Ends a process that no engine was made of."""
    with contextlib.suppress(OSError):
        process.send(encode(Close()))
    process.close()
    process.release()
