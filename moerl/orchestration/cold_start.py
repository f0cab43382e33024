"""The cold start of a run: trained, found whole, or written again from its checkpoint. Runs in the controller."""

from __future__ import annotations

from pathlib import Path

from moerl.contract.sealed import find_damage
from moerl.errors import CheckpointError
from moerl.orchestration import sft
from moerl.orchestration.run import Run
from moerl.orchestration.run_state import STAGE_ORDER
from moerl.trainer.checkpoint import CHECKPOINTS, CheckpointName, find_problem

FOLDER = "cold_start"
"""Folder of the cold start's weights in the run directory."""


def cold_start(run: Run, model_path: Path, *, for_its_weights: bool = True) -> Path:
    """Trains the cold start, unless the run goes on after it; returns its directory. A damaged directory is written
    again from the stage's last checkpoint.

    Args:
        model_path: model directory that the cold start is trained from.
        for_its_weights: False if weights of a newer checkpoint will replace those of the directory, so that any model
            of this shape will do. If the directory is damaged and cannot be written again, `model_path` is returned.

    Raises:
        CheckpointError: the directory is damaged, its weights are needed, and the checkpoint is gone.
    """
    output = run.config.run_dir / FOLDER
    if not run.has_done(sft.STAGE, run.config.sft.steps):
        sft.train(run, model_path, output)
        return output
    name = CheckpointName(STAGE_ORDER.index(sft.STAGE), sft.STAGE, run.config.sft.steps)
    checkpoint = run.config.run_dir / CHECKPOINTS / str(name)
    damage = find_damage(output)
    if damage is None:
        return output
    problem = find_problem(checkpoint)
    if problem is not None and not for_its_weights:
        run.reporter.say(
            f"WARNING: {output}: {damage}; {checkpoint.name}: {problem}. It stays as it is: the run goes on from the"
            " weights of its newest checkpoint"
        )
        return model_path
    if problem is not None:
        raise CheckpointError(
            f"the cold start {output} is damaged and cannot be written again",
            seen=f"{damage}; {checkpoint.name}: {problem}",
            expected=f"a whole {FOLDER}, or the checkpoint of the end of its stage",
            remedy=f"restore {FOLDER} from a copy, or start a new run",
        )
    run.reporter.say(f"WARNING: {output}: {damage}; writing it again from {checkpoint}")
    run.trainer.rewrite(model_path, checkpoint, output)
    return output
