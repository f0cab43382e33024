"""Guard of one command, a reward or an MCP server: ends all of it, the command, what it started, and what that started.
Started by `moerl.processes.host` as a script, so it imports the standard library alone.

    guard.py PARENT STATUS MEMORY COMMAND...

PARENT is the process id of the starter, STATUS a descriptor for the process ids of the second guard and the command,
MEMORY the bytes that each process of it may take. The command gets the guard's standard streams, a session of its own,
and leaves the guard alone. The guard ends when the command ends, at SIGUSR2, when nobody holds the other end of its
standard input, or when its parent is gone; it kills whatever still runs first, and ends in the way the command did. It
hands `HANDED_ON` on. Signals that were blocked when it started, those to a whole job, leave it alone, and are blocked
when COMMAND starts.

There are two guards, one the parent of the other. Every orphan becomes the child of the nearer one that lives, however
it left its parent, session and environment. So if one guard is killed, the other one ends everything. If both are
killed at once, the command dies; a daemon that it has started does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

POLL_MILLISECONDS = 500
"""How often the guard looks for its parent; everything else wakes it at once."""

HANDED_ON = signal.SIGRTMIN
"""Signal that the command gets, too; its meaning is the command's."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> None:
    """Runs the command between two guards; never returns."""
    parent, status, memory_bytes = (int(each) for each in arguments[:3])
    _guard(parent, status, lambda first: _second(first, status, arguments[3:], memory_bytes))


def _second(first: int, status: int, command: list[str], memory_bytes: int) -> None:
    """Turns this fork into the second guard, which hears at once if the first one dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2)
    os.write(status, b"%d " % os.getpid())
    _guard(first, status, lambda guard: _become(command, guard, memory_bytes, status))


def _guard(parent: int, status: int, become: Callable[[int], None]) -> None:
    """Guards a fork of this process, and ends this process.

    Args:
        become: runs in the fork with the process id of the guard, and does not return.
    """
    guarded: list[int] = []
    stop: list[int] = []
    wake = _wake_on_signals()
    spared = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in (*spared, signal.SIGCHLD):
        signal.signal(number, _nothing)
    signal.signal(signal.SIGUSR2, lambda number, _: stop.append(number))
    signal.signal(HANDED_ON, lambda *_: [_kill(os.kill, pid, HANDED_ON) for pid in guarded])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            become(guard)
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, spared)
    guarded.append(pid)
    # The reader of the command's output must see its end: this guard may not hold the pipes open.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2, status):
        os.dup2(nowhere, descriptor)
    ended = _watch(pid, parent, wake, stop)
    guarded.clear()
    _end_all(pid)
    if ended is not None and os.WIFSIGNALED(ended):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(os.WTERMSIG(ended), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(ended))
    os._exit(0 if ended is None else os.waitstatus_to_exitcode(ended))


def _become(command: list[str], guard: int, memory_bytes: int, status: int) -> None:
    """Turns this fork into the command; it dies with the guard."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        return
    os.write(status, b"%d\n" % os.getpid())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # If memory runs out, the kernel must kill a reward, whose call is repeated, and not the run.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    os.execv(command[0], command)


def _watch(command: int, parent: int, wake: int, stop: list[int]) -> int | None:
    """Waits for the end; returns the command's status, None if the guard has to end it. Reaps orphans, too."""
    poll = select.poll()
    poll.register(0, 0)  # only that the other side closes it: the input is for the command
    poll.register(wake, select.POLLIN)
    while True:
        for pid, status in _ended():
            if pid == command:
                return status
        if stop or os.getppid() != parent:
            return None
        for descriptor, _ in poll.poll(POLL_MILLISECONDS):
            if descriptor == 0:
                return None
            os.read(wake, 4096)


def _ended() -> Iterator[tuple[int, int]]:
    """Yields each child that has ended, once, with its status."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _end_all(command: int) -> None:
    """Kills the command's group, then everything that is or becomes a child of the guard, until nothing is left."""
    _kill(os.killpg, command, signal.SIGKILL)
    while True:
        for pid in _children():
            _kill(os.kill, pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, number)


def _children() -> list[int]:
    """Returns the guard's children. Without /proc there are none: only the command's group can be ended then."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _wake_on_signals() -> int:
    """Returns a descriptor that becomes readable when a signal with a handler comes."""
    wake, signalled = os.pipe()
    for descriptor in (wake, signalled):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    return wake


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handles a signal by nothing: unlike SIG_IGN, the command does not inherit a handler."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(sys.argv[1:])
