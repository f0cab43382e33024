"""Which rank this process is, as its launcher said in the environment. Torch-free; every process of a run.

`moerl.launch.local` starts ranks with RANK, WORLD_SIZE and MOERL_RENDEZVOUS set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from moerl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process among the trainer's processes.

    rendezvous: torch.distributed init method (``file:///...``); empty in a process that nobody launched.
    is_launched: True in a process that `moerl.launch.local` started.
    """

    rank: int
    world_size: int
    rendezvous: str
    is_launched: bool


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Reads this process's rank; a process that nobody launched is rank 0 of 1.

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
        return RankInfo(0, 1, rendezvous="", is_launched=False)
    try:
        rank, world_size = (int(environment[name]) for name in ("RANK", "WORLD_SIZE"))
    except (KeyError, ValueError) as error:
        raise _bad_rank(f"{type(error).__name__}: {error}") from error
    if not 0 <= rank < world_size:
        raise _bad_rank(f"RANK={rank} WORLD_SIZE={world_size}")
    return RankInfo(rank, world_size, rendezvous, is_launched=True)


def _bad_rank(seen: str) -> ConfigError:
    return ConfigError(
        "rank variables: not what moerl's launcher sets",
        seen=seen,
        expected="RANK and WORLD_SIZE as whole numbers, RANK below WORLD_SIZE",
        remedy="unset MOERL_RENDEZVOUS and run `moerl train` again",
    )
