"""Ties between processes of a run: files to meet in, and the death of a child with its parent. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from moerl.processes.spared import ignore_stop_signals

_PARENT = "MOERL_CONTROLLER_PID"
"""Variable with the id of the process that a child dies with."""
_PR_SET_PDEATHSIG = 1


def new_rendezvous(folder: Path) -> Path:
    """Names a new file in `folder` for torch.distributed to meet in: unlike a port, nobody else can take it. The file
    is not made yet."""
    return folder.resolve() / f".rendezvous-{uuid.uuid4().hex}"


def child_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables of a child of this process that is `connected`; None = those of this process."""
    return {**(os.environ if environment is None else environment), _PARENT: str(os.getpid())}


def is_running(pid: int) -> bool:
    """Returns whether a process on this host has not ended. False also for one that has ended but whose parent has not
    asked for its status: the first process of a container may never do so."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    # It has ended, or is another user's that /proc hides.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def connected(descriptor: str) -> Iterator[socket.socket]:
    """Makes this process, a `moerl.processes.child.Child`, end with its parent and by no signal to the whole job, and
    yields its connection to the parent. Ends the block in silence if the connection breaks off: nobody is there to be
    told.

    Args:
        descriptor: of the connection, as the command line of this process has it.
    """
    ignore_stop_signals()
    die_with(int(os.environ[_PARENT]))
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            yield connection
        except (EOFError, BrokenPipeError, ConnectionResetError):
            # Files and other connections raise these, too.
            if not _has_ended(connection):
                raise


def _has_ended(connection: socket.socket) -> bool:
    """Returns whether the other side of a connection is gone."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent, of this pid, dies in any way. Does nothing but on Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
