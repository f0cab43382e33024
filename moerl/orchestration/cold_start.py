"""The cold start of a run: trained, found whole, or written again from its checkpoint. Runs in every trainer rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from moerl.contract.sealed import find_damage
from moerl.errors import CheckpointError
from moerl.orchestration import sft
from moerl.orchestration.exchange import broadcast_bytes
from moerl.orchestration.run import CHECKPOINTS, STAGE_ORDER, Run
from moerl.trainer.checkpoint import CheckpointName, find_problem
from moerl.trainer.model import PolicyModel
from moerl.trainer.sharded_state import load_weights

FOLDER = "cold_start"
"""In the run directory."""


def cold_start(run: Run, model_path: Path) -> Path:
    """The directory of the cold start. A collective of all ranks.

    It is trained unless the run goes on behind it. Where it is damaged then, it is written again from the stage's last
    checkpoint.

    Raises:
        CheckpointError: the run is in reinforcement learning, the directory is damaged, and that checkpoint is gone.
    """
    output = run.config.run_dir / FOLDER
    if not run.has_done(sft.STAGE, run.config.sft.steps):
        sft.train(run, model_path, output)
        return output
    name = CheckpointName(STAGE_ORDER.index(sft.STAGE), sft.STAGE, run.config.sft.steps)
    checkpoint = run.config.run_dir / CHECKPOINTS / str(name)
    damage, problem = _look(run, output, checkpoint)
    if damage is None:
        return output
    if problem is not None:
        raise CheckpointError(
            f"the cold start {output} is damaged and cannot be written again",
            seen=f"{damage}; {checkpoint.name}: {problem}",
            expected=f"a whole {FOLDER}, or the checkpoint of the end of its stage",
            remedy=f"restore {FOLDER} from a copy, or start a new run",
        )
    run.reporter.say(f"WARNING: {output}: {damage}; writing it again from {checkpoint}")
    model = PolicyModel(
        replace(run.model, folder=model_path), run.model_options(run.config.sft.moe_aux_loss_coef), run.layout
    )
    load_weights(checkpoint, model.chunks)
    run.write_model(output, like=model_path, trainer=model)
    return output


def _look(run: Run, output: Path, checkpoint: Path) -> tuple[str | None, str | None]:
    """What is wrong with the directory and, where something is, with the checkpoint; seen by the main rank."""
    found: tuple[str | None, str | None] = (None, None)
    if run.layout.is_main:
        damage = find_damage(output)
        found = (damage, find_problem(checkpoint) if damage else None)
    damage, problem = json.loads(broadcast_bytes(json.dumps(found).encode()))
    return damage, problem
