"""Ties between processes of a run: files to meet in, and the death of a child with its parent. Torch-free."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid
from collections.abc import Mapping
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
    """Returns the variables of a child of this process that calls `belong_to_parent`; None = those of this process."""
    return {**(os.environ if environment is None else environment), _PARENT: str(os.getpid())}


def belong_to_parent() -> None:
    """Calls `belong_to` with the process that made `child_environment`."""
    belong_to(int(os.environ[_PARENT]))


def belong_to(parent: int) -> None:
    """Makes this process end with its parent, of this pid, and by no signal to the whole job. Every child that
    `start_spared` starts calls this first."""
    ignore_stop_signals()
    die_with(parent)


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent, of this pid, dies in any way. Does nothing but on Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
