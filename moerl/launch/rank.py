"""What ties ranks to their launcher: where they meet, and that they die with it. Torch-free."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def new_rendezvous(directory: Path) -> str:
    """A file-store rendezvous of its own in `directory`: unlike a port, nobody else can take it. Not made yet."""
    return f"file://{directory.resolve()}/.rendezvous-{uuid.uuid4().hex}"


def die_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """In a launched rank on Linux: asks the kernel to kill this process when its launcher dies, however it dies."""
    launcher = environment.get("MOERL_LAUNCHER_PID")
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
