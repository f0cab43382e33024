"""Questions to a run directory about going on with its run. Torch-free, and quick to import: every command does."""

from __future__ import annotations

import shlex
from pathlib import Path


def is_finished(run_dir: Path) -> bool:
    """Returns True if the run has nothing left to do. A run writes its summary last, and removes it if it goes on after
    all."""
    return (run_dir / "summary.json").exists()


def can_go_on(run_dir: Path) -> bool:
    """Returns True if a checkpoint was written."""
    from moerl.trainer.checkpoint import CHECKPOINTS, checkpoint_names

    return bool(checkpoint_names(run_dir / CHECKPOINTS))


def how_to_go_on(command: str, run_dir: Path) -> str:
    """Returns the command line that goes on with the run."""
    line = f"moerl {command} {shlex.quote(f'resume={run_dir}')}"
    return f"go on from the last checkpoint: {line}" if can_go_on(run_dir) else f"go on, nothing was saved yet: {line}"
