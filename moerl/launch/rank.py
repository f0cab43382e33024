"""Which rank this process is, as its launcher said in the environment. Torch-free; every process of a run.

`moerl.launch.local` starts ranks with RANK, LOCAL_RANK, WORLD_SIZE, MOERL_RENDEZVOUS and MOERL_LAUNCHER_PID set.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moerl.errors import ConfigError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process among the trainer's processes.

    rendezvous: torch.distributed init method (``file:///...``).
    is_launched: True in a process that `moerl.launch.local` started.
    """

    rank: int
    local_rank: int
    world_size: int
    rendezvous: str
    is_launched: bool


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Reads this process's rank; a process that nobody launched is rank 0 of 1, with a rendezvous of its own.

    Raises:
        ConfigError: Another launcher started the process, or the variables are not whole numbers that fit.
    """
    rendezvous = environment.get("MOERL_RENDEZVOUS", "")
    if not rendezvous:
        if environment.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "WORLD_SIZE: another launcher started this process",
                seen=environment["WORLD_SIZE"],
                expected="no launcher: moerl starts its own ranks",
                remedy="run `moerl train` directly, without torchrun or mpirun",
            )
        return RankInfo(0, 0, 1, new_rendezvous(Path(tempfile.gettempdir())), is_launched=False)
    try:
        rank, local_rank, world_size = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    except (KeyError, ValueError) as error:
        raise _bad_rank(f"{type(error).__name__}: {error}") from error
    if not 0 <= rank < world_size:
        raise _bad_rank(f"RANK={rank} WORLD_SIZE={world_size}")
    return RankInfo(rank, local_rank, world_size, rendezvous, is_launched=True)


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


def _bad_rank(seen: str) -> ConfigError:
    return ConfigError(
        "rank variables: not what moerl's launcher sets",
        seen=seen,
        expected="RANK, LOCAL_RANK and WORLD_SIZE as whole numbers, RANK below WORLD_SIZE",
        remedy="unset MOERL_RENDEZVOUS and run `moerl train` again",
    )
