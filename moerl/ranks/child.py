"""The program of a rank's process, its variables and its log, on any machine. Runs in the controller, and in actors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from moerl.config.ranks import RankConfig, rank_threads
from moerl.machine.torch_start import tf32_variables
from moerl.processes.child import module_program

PROGRAM = module_program("moerl.ranks.process")


def rank_variables(config: RankConfig, rank: int, local_rank: int) -> dict[str, str]:
    """Returns the variables of a rank's process. local_rank: its number among those that see the same GPUs."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(config.parallel.world_size),
        "OMP_NUM_THREADS": str(rank_threads(config, "sft")),
        **tf32_variables(config.trainer.tf32),
    }


def remove_empty_folders(logs: Sequence[Path]) -> None:
    """Removes the folders of logs if they are empty."""
    for folder in {log.parent for log in logs}:
        with contextlib.suppress(OSError):  # another has come, or nothing can be removed
            folder.rmdir()


def log_of(run_dir: Path, rank: int) -> Path:
    """Returns the path of a rank's log in a run directory."""
    return run_dir / "logs" / f"rank-{rank}.log"
