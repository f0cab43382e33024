"""Calls a user's reward function in a process of its own, so that it can neither hang nor crash the run.

One long-lived child (`moerl.tasks.reward_worker`) per task; it is killed when a call runs past its time
limit and started again at the next call. Runs in the controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from moerl.errors import ConfigError, RewardError

IMPORT_SECONDS = 120.0
"""Time a user's module may take to import."""

EXIT_SECONDS = 5.0
"""Time a child whose pipes are closed is given to end by itself."""

_WORKER = Path(__file__).with_name("reward_worker.py")
_READ_BYTES = 65_536


class RewardProcess:
    """A user's reward function behind a time limit. Safe to call from several threads, one call at a time.

    Args:
        function: ``package.module:function``, called with ``(row, response_text)``. Modules are looked for where
            this process finds them, then in the current directory.
        timeout_seconds: Time one call may take.

    Raises:
        ConfigError: The name has another form, or the function cannot be imported.
    """

    def __init__(self, function: str, timeout_seconds: float) -> None:
        module, colon, attribute = function.partition(":")
        if not (module and colon and attribute.isidentifier()):
            raise ConfigError(
                "task.reward does not name a function",
                seen=repr(function),
                expected="package.module:function",
                remedy="write the module, a colon and the function",
            )
        self._function = function
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._child: _Child | None = self._start()

    def score(self, row: Mapping[str, Any], response: str) -> dict[str, float]:
        """Named rewards of a response; `reward` and `accuracy` are always among them.

        Raises:
            RewardError: The function raised, hung, crashed, or returned something else than finite rewards.
            The sample
                has no reward; the next call works again.
        """
        with self._lock:
            if self._child is None:
                self._child = self._start()
            try:
                reply = self._child.ask({"row": dict(row), "response": response}, self._timeout_seconds)
            except _ChildLostError as lost:
                self._child = None
                raise RewardError(
                    f"reward function {self._function} gave no answer",
                    seen=str(lost),
                    expected=f"a reward within {self._timeout_seconds:g} s",
                    remedy="make the function return in time, or raise task.reward_timeout_seconds",
                ) from lost
        if "error" in reply:
            raise RewardError(
                f"reward function {self._function} failed",
                seen=reply["error"],
                expected="a finite number, or a mapping of names to finite numbers that holds 'reward'",
                remedy="make the function handle this row and response",
            )
        return reply["rewards"]

    def close(self) -> None:
        """Ends the child. A later call starts a new one."""
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._child = None

    def _start(self) -> _Child:
        child = _Child()
        try:
            reply = child.ask({"function": self._function, "sys_path": [*sys.path, os.getcwd()]}, IMPORT_SECONDS)
        except _ChildLostError as lost:
            reply = {"error": str(lost)}
        if "error" in reply:
            child.kill()
            raise ConfigError(
                f"task.reward: cannot import {self._function}",
                seen=reply["error"],
                expected="an importable module with a function of that name",
                remedy="check the name; the module must be in the current directory or in a folder on PYTHONPATH",
            )
        return child


class _ChildLostError(Exception):
    """The child did not answer and is gone."""


class _Child:
    """The process and its two pipes."""

    def __init__(self) -> None:
        # A session of its own, so that killing it reaches whatever the function has started. -P keeps the folder
        # of this package off the child's import path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._unread = b""

    def ask(self, message: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Sends a line and returns the next one; kills the child and raises `_ChildLostError` where none comes."""
        deadline = time.monotonic() + timeout_seconds
        pipe = _pipe(self._process.stdin)
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise _ChildLostError(self._obituary()) from error
        while b"\n" not in self._unread:
            self._unread += self._read(deadline)
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def _read(self, deadline: float) -> bytes:
        pipe = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                self.kill()
                raise _ChildLostError("time limit passed; its process was killed")
        data = os.read(pipe.fileno(), _READ_BYTES)
        if not data:
            raise _ChildLostError(self._obituary())
        return data

    def _obituary(self) -> str:
        # Its pipes close a moment before it has an exit code.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self.kill()
        return f"its process ended with code {self._process.returncode}"

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # Closing sends what is still buffered, to nobody.
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the child is always started with pipes"
    return pipe
