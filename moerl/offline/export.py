"""`moerl export`: the weights of any kept checkpoint of a run, as a Hugging Face directory. Runs in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from moerl.config.hub_model import hub_model, with_hub_model
from moerl.config.load import check_export
from moerl.contract.parallel import ParallelDims
from moerl.errors import CheckpointError
from moerl.machine.hub import fetch_weights
from moerl.machine.model_files import INITIAL_MODEL
from moerl.models.description import read_model
from moerl.ranks.libraries import quiet_libraries
from moerl.trainer import groups
from moerl.trainer.checkpoint import CHECKPOINTS, CheckpointStore, checkpoint_names, find_problem, parse_name
from moerl.trainer.hf_directory import write_model
from moerl.trainer.model import ModelOptions, PolicyModel
from moerl.trainer.sharded_state import load_weights


def run_export(run_dir: Path, step: int | None, output: Path) -> int:
    """Writes the weights of one checkpoint to `output`. Returns exit code 0.

    Args:
        run_dir: directory of a run in any parallel layout; the run may go on training meanwhile.
        step: step of the checkpoint; if both stages have one of this step, that of reinforcement learning. None for the
            newest valid one.

    Raises:
        ConfigError: `output` is there already, or `run_dir` has no run.
        CheckpointError: there is no such checkpoint, or it is corrupt.
    """
    config = check_export(run_dir, output)
    source = with_hub_model(config.model, None)
    of_hub = hub_model(source)
    if of_hub is not None:
        fetch_weights(of_hub)
    path = _newest(run_dir) if step is None else _of_step(run_dir, step)
    quiet_libraries()
    torch.set_num_threads(config.num_threads)
    layout = groups.start(rank=0, rendezvous="", dims=ParallelDims(), seed=config.seed)
    model_path = source.path or run_dir / INITIAL_MODEL
    options = ModelOptions(dtype=config.model.dtype, megatron=config.trainer.megatron)
    model = PolicyModel(read_model(model_path), options, layout)
    load_weights(path, model.chunks)
    write_model(output, model_path, model.export())
    groups.stop()
    print(f"{path.name} written to {output}")
    return 0


def _newest(run_dir: Path) -> Path:
    found = CheckpointStore(run_dir / CHECKPOINTS, keep=1).latest()
    if found is None:
        raise _none(run_dir, "none")
    for problem in found.skipped:
        print(f"WARNING: corrupt checkpoint left aside: {problem}", file=sys.stderr)
    return found.path


def _of_step(run_dir: Path, step: int) -> Path:
    names = [parse_name(name) for name in checkpoint_names(run_dir / CHECKPOINTS)]
    found = [str(name) for name in names if name is not None and name.step == step]
    if not found:
        raise _none(run_dir, f"--step {step}; there are {', '.join(map(str, names)) or 'none'}")
    path = run_dir / CHECKPOINTS / found[-1]
    problem = find_problem(path)
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint {path} is corrupt",
            seen=problem,
            expected="files that match its manifest",
            remedy="export another step, or restore the directory from a copy",
        )
    return path


def _none(run_dir: Path, seen: str) -> CheckpointError:
    return CheckpointError(
        f"no such checkpoint in {run_dir / CHECKPOINTS}",
        seen=seen,
        expected="a checkpoint of this step",
        remedy="give the --step of one that is there; checkpoint.keep says how many are",
    )
