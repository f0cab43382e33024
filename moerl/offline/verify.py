"""`moerl verify`: dumped rollouts replayed through transformers and the trainer, compared with the engine's log-probs.

Runs in one process; the two models are loaded one after the other. All three compute with the recorded experts and
inside the recorded kept sets, so the differences that are left come from arithmetic, or from a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moerl.config.paths import dump_files
from moerl.contract.disk import read_parquet
from moerl.contract.trajectory import Trajectory
from moerl.diagnostics.second_opinion import compare_logprobs, compare_routing, print_opinions
from moerl.errors import ConfigError
from moerl.machine.model_tensors import check_weights
from moerl.models.description import ModelDescription, read_model
from moerl.offline.trainer_scorer import by_sample, lone_trainer, pack_alone
from moerl.ranks.libraries import quiet_libraries
from moerl.rollout.replay import Replayed, TransformersReplay
from moerl.trainer import platform
from moerl.trainer.losses import Scorer
from moerl.trainer.model import DTYPES
from moerl.trainer.trainer import MegatronTrainer

ENGINE, TRANSFORMERS, TRAINER = "engine", "transformers", "Megatron"


def run_verify(dump: Path, model: Path, *, tolerance: float, version: int | None) -> int:
    """Prints how far the log-probs of engine, transformers and trainer are apart.

    Args:
        dump: a Parquet dump, or a directory of them.
        model: Hugging Face directory with the weights that sampled.
        tolerance: nats; largest difference of two log-probs of any one token.
        version: policy version of the trajectories to compare; None if the dump has one version.

    Returns:
        Exit code: 0, or 1 if a trajectory is outside the tolerance.

    Raises:
        ConfigError: there is nothing to verify, the model is not the one of the dump, or the version is not named.
        ReplayError, EngineError: the recorded routing could not be enforced.
    """
    trajectories = select_version(read_dump(dump), version)
    described, dtype = describe_dumped(model, trajectories)
    check_weights(model)
    quiet_libraries()
    print(f"{len(trajectories)} trajectories, {model} in {dtype}")
    replayed = _by_transformers(trajectories, described, dtype)
    with lone_trainer(described, dtype) as trainer:
        trained = trainer_logprobs(trainer, trajectories)
    opinions = [
        compare_logprobs(t, {ENGINE: t.rollout_logprobs, TRANSFORMERS: theirs.logprobs, TRAINER: ours})
        for t, theirs, ours in zip(trajectories, replayed, trained, strict=True)
    ]
    layers = compare_routing(trajectories, [each.own_ids for each in replayed])
    print_opinions(opinions, layers, tolerance)
    return 0 if all(opinion.within(tolerance) for opinion in opinions) else 1


def read_dump(dump: Path) -> list[Trajectory]:
    """Reads the trajectories of a Parquet file, or of all Parquet files in a directory, by name.

    Raises:
        ConfigError: there is no such file. ContractError: one is damaged or breaks an invariant.
    """
    files = dump_files(dump)
    return [trajectory for file in files for trajectory in read_parquet(file)]


def select_version(trajectories: Sequence[Trajectory], version: int | None) -> list[Trajectory]:
    """Returns the trajectories that one policy version sampled throughout; prints how many are left out.

    A Hugging Face directory does not record its version: the caller names the version in the directory, and the
    comparison shows whether that is true. A trajectory that was under way during a weight update is left out whole: its
    later tokens attend to keys and values of the older weights, which no model computes again.

    Raises:
        ConfigError: there are several versions and none is named, or no trajectory has the named one.
    """
    versions = [np.unique(trajectory.policy_versions[trajectory.sampled]).tolist() for trajectory in trajectories]
    found = sorted({each for several in versions for each in several})
    if version is None and len(found) > 1:
        raise ConfigError(
            "--version: the dump was sampled by several policy versions, and a model holds one",
            seen=f"versions {_listed(found)}",
            expected="one",
            remedy="name the model's with --version; `moerl export RUN_DIR --step N` writes the model of version N",
        )
    wanted = found[0] if version is None else version
    chosen = [t for t, several in zip(trajectories, versions, strict=True) if several == [wanted]]
    if not chosen:
        raise ConfigError(
            "--version: no trajectory was sampled by this policy version alone",
            seen=wanted,
            expected=f"one of {_listed(found)}",
            remedy="name the version of the model; unless a run samples ahead, the dump of step S holds version S - 1",
        )
    print(f"policy version {wanted}, taken to be that of the model")
    if len(chosen) < len(trajectories):
        left_out = len(trajectories) - len(chosen)
        print(f"left out: {left_out} of {len(trajectories)} trajectories with tokens of other policy versions")
    return chosen


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))


def describe_dumped(model: Path, trajectories: Sequence[Trajectory]) -> tuple[ModelDescription, str]:
    """Returns the model with the spec of the dump, and the dtype that its config names (float32 if it names none).

    Raises:
        ConfigError: its dtype is not one that the trainer has, or its architecture is not that of every trajectory.
    """
    found = read_model(model)
    config, theirs = found.hf_config, found.spec
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise ConfigError("--model: dtype in config.json", seen=dtype, expected=f"one of {', '.join(DTYPES)}")
    for trajectory in trajectories:
        ours = trajectory.spec
        if (ours.fingerprint, ours.num_moe_layers) != (theirs.fingerprint, theirs.num_moe_layers):
            raise ConfigError(
                "--model: not the model that sampled the dump",
                seen=f"architecture {theirs.fingerprint} of {model}",
                expected=f"{ours.fingerprint} of {trajectory.lineage.rollout_id}",
                remedy="give the model directory of the run that wrote the dump",
            )
    return replace(found, spec=trajectories[0].spec), dtype


def _by_transformers(trajectories: Sequence[Trajectory], model: ModelDescription, dtype: str) -> list[Replayed]:
    judge = TransformersReplay(model, dtype=DTYPES[dtype], device=platform.device())
    return [judge.replay(trajectory) for trajectory in trajectories]


def trainer_logprobs(trainer: MegatronTrainer, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
    """Returns the log-probs of a trainer that is alone, in one process, which proves that routing was replayed: float32
    [S] each, nats, 0 where not sampled."""
    batches = pack_alone(trajectories)
    scores = trainer.score(batches, Scorer(batches, keep_mask=True), enforce=True, in_sets=True)
    logprobs = [
        torch.where(torch.from_numpy(batch.loss_mask.copy()), rows.logprobs_T, 0.0).float().numpy()
        for batch, rows in zip(batches, scores, strict=True)
    ]
    return [np.insert(found, 0, 0.0) for found in by_sample(batches, logprobs)]
