"""The process of a user's reward function, seen from the controller: its pipes, its time limit, and its end.

`moerl.processes.guard` stands between the two: it ends the function and all that it has started, also when the
controller is killed. A limited number of the lines that the function prints is shown. Runs in the controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from moerl.processes.host import EXIT_SECONDS, PIPE, end_guarded, start_guarded, wait_for
from moerl.tasks.rewards.worker import CALL_BYTES, DUMP_SIGNAL, LENGTH_DIGITS, OUT_OF_MEMORY
from moerl.telemetry.terminal import ShownLines, excerpt

MAX_REPLY_BYTES = 65_536
"""Longest reply for one response."""

DUMP_SECONDS = 5.0
"""Longest time that a process that hangs has to name the line it is at; usually it needs milliseconds."""

_WORKER = Path(__file__).with_name("worker.py")
_READ_BYTES = 65_536
_DUMP_ENDS = (b"in <module>\n", b"\n  ...\n")
"""Ends of the dump of a stack: complete, and cut."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

Frame = tuple[str, int, str]
"""File, line and function."""


Loss = Literal["late", "memory", "outside", "other"]
"""Kind of a loss: the time limit passed; the process reported that it had no memory left; its node was lost, or SIGKILL
ended it, so perhaps it is not to blame; anything else."""


class ChildLostError(Exception):
    """Loss of a process that gave no usable answer.

    Args:
        cause: Why.
        place: The line that the process was at; empty if it is not known.
        kind: Kind of the cause.
    """

    def __init__(self, cause: str, place: str = "", kind: Loss = "other") -> None:
        super().__init__(cause + (f", in {place}" if place else ""))
        self.kind: Loss = kind


class ChildProcess(Protocol):
    """One process, here or on another node. Belongs to one thread; any thread may `end` it."""

    def ask(
        self, message: Mapping[str, Any], timeout_seconds: float, *, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> dict[str, Any]:
        """Sends a request and returns the reply. Raises `ChildLostError` if none comes, or something else does."""
        ...

    def end(self) -> None:
        """Starts to end the process and all that it has started; does not wait. Its owner still has to call `kill`."""

    def kill(self) -> None:
        """Ends the process and all that it has started, and waits for that. Does nothing if it was killed before."""


class RewardChild:
    """A `ChildProcess` on this machine.

    Args:
        memory_bytes: most memory of the process, and of each that it starts.
        shown: gets what the process prints.
        folder: its working directory; None = that of this process.
    """

    def __init__(self, memory_bytes: int, shown: ShownLines, folder: Path | None = None) -> None:
        faults, theirs = os.pipe()
        # -P keeps the folder of this package off the child's import path; -u shows what is printed when it is.
        worker = [sys.executable, "-P", "-u", str(_WORKER), str(theirs)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), PIPE)
        self._process = start_guarded(worker, memory_bytes, theirs, **pipes, bufsize=0, cwd=folder)
        os.close(theirs)
        self._requests, self._replies = _pipe(self._process.stdin), _pipe(self._process.stdout)
        self._prints, self._faults = _pipe(self._process.stderr), os.fdopen(faults, "rb", buffering=0)
        for pipe in (self._requests, self._replies, self._prints, self._faults):
            os.set_blocking(pipe.fileno(), False)
        self._shown = shown
        self._heard = {self._replies, self._prints, self._faults}
        self._unsent, self._unread, self._said = b"", b"", b""

    def ask(
        self, message: Mapping[str, Any], timeout_seconds: float, *, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> dict[str, Any]:
        call = secrets.token_hex(CALL_BYTES // 2)
        content = json.dumps(message).encode()
        self._unsent = b"%0*d" % (LENGTH_DIGITS, len(content)) + content + call.encode()
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._unread:
            if len(self._unread) > max_reply_bytes:
                raise self._lost(f"its reply was longer than {max_reply_bytes:,} bytes")
            is_late = time.monotonic() > deadline
            self._exchange(deadline)
            # Output that does not end, unlike a reply that is there, does not put off the limit.
            if is_late and b"\n" not in self._unread:
                raise self._late()
        self._show()
        line, _, more = self._unread.partition(b"\n")
        self._unread = b""
        with contextlib.suppress(ValueError, RecursionError):
            reply = json.loads(line)
            if isinstance(reply, dict) and reply.pop("call", None) == call and not more:
                return reply
        raise self._lost("something else than the reward process wrote to the pipe of the replies")

    def end(self) -> None:
        # The guard ends it.
        self._process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        if self._requests.closed:
            return
        end_guarded(self._process, self._hear)
        self._show()
        self._shown.end(sys.stderr)
        for pipe in (self._requests, self._replies, self._prints, self._faults):
            pipe.close()

    def _exchange(self, deadline: float) -> None:
        """Waits, until the deadline at most, until something can be sent or has come, and sends or reads it."""
        with selectors.DefaultSelector() as selector:
            for pipe in self._heard:
                selector.register(pipe, selectors.EVENT_READ)
            if self._unsent:
                selector.register(self._requests, selectors.EVENT_WRITE)
            ready = {key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
        if self._prints in ready:
            self._show()
        if self._faults in ready:
            self._hear()
        if self._requests in ready:
            try:
                self._unsent = self._unsent[self._requests.write(self._unsent) or 0 :]
            except BrokenPipeError:
                # The pipe of the replies will show that the process ended.
                self._unsent = b""
        if self._replies in ready:
            data = self._replies.read(_READ_BYTES)
            if data == b"":
                raise self._ended()
            self._unread += data or b""

    def _show(self) -> None:
        """Shows what was printed."""
        self._shown.feed(self._take(self._prints), sys.stderr)

    def _hear(self) -> bytes:
        """Returns what guard and worker wrote: the process ids of the second guard and the worker, then the stack."""
        self._said = (self._said + self._take(self._faults))[:_READ_BYTES]
        return self._said

    def _take(self, pipe: IO[bytes]) -> bytes:
        """Reads what has come by a pipe, which is not waited for any more once it has ended."""
        data = pipe.read(_READ_BYTES)
        if data == b"":
            self._heard.discard(pipe)
        return data or b""

    def _late(self) -> ChildLostError:
        self._process.send_signal(DUMP_SIGNAL)
        deadline = time.monotonic() + DUMP_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._faults, selectors.EVENT_READ)
            while not self._said.endswith(_DUMP_ENDS) and self._faults in self._heard and time.monotonic() < deadline:
                if selector.select(max(0.0, deadline - time.monotonic())):
                    self._hear()
        return self._lost("time limit passed; its process was killed", "late")

    def _ended(self) -> ChildLostError:
        code = wait_for(self._process, EXIT_SECONDS)
        if code is None:
            return self._lost("it closed the pipe of its replies; its process was killed")
        if code == OUT_OF_MEMORY:
            return self._lost("its process had no memory left to answer with", "memory")
        how = f"by signal {_signal_name(-code)}" if code < 0 else f"with code {code}"
        return self._lost(f"its process ended {how}", "outside" if code == -signal.SIGKILL else "other")

    def _lost(self, cause: str, kind: Loss = "other") -> ChildLostError:
        """Ends the process, and returns its loss."""
        self._hear()
        self.kill()
        dump = self._said.rpartition(b"most recent call first")[2].decode(errors="replace")
        frames = [(file, int(line), name) for file, line, name in _FRAME.findall(dump)]
        return ChildLostError(cause, where(frames), kind)


def where(frames: Sequence[Frame]) -> str:
    """Returns the line that a user's code was at: the innermost one of no library, and the innermost of all; empty if
    it is not known.

    Args:
        frames: innermost first.
    """
    ours = [frame for frame in frames if frame[0] != str(_WORKER) and not frame[0].startswith("<frozen")]
    if not ours:
        return ""
    own = next((frame for frame in ours if not frame[0].startswith(("<", *_LIBRARIES))), ours[-1])
    return _place(own) + ("" if own == ours[0] else f", below it {_place(ours[0])}")


def _place(frame: Frame) -> str:
    file, line, name = frame
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return excerpt(f"{name} ({path}:{line})")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the child is always started with pipes"
    return pipe
