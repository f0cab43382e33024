"""Our own Parquet dumps, read as strictly as for training. Any process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moerl.contract.disk import read_parquet
from moerl.contract.dump_columns import TEXTS
from moerl.diagnostics.dumps.parquet import rows
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.rollout import DumpedRollout

FORMAT = "moerl dump"


def read(file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    """Yields the rollouts. Raises `ContractError` if the file, or a trajectory of it, is not sound."""
    trajectories, step = read_parquet(file), step_of(file)
    texts = [row for _, row in rows(file, TEXTS)]
    for trajectory, row in zip(trajectories, texts, strict=True):
        top_ps, turns = np.ones(len(trajectory), np.float32), np.zeros(len(trajectory), np.int16)
        for number, turn in enumerate(trajectory.turns):
            turns[turn.start : turn.end] = number
            if turn.sampling is not None:
                top_ps[turn.start : turn.end] = turn.sampling.top_p
        prompt, response = (row.get(name, "") for name in TEXTS)
        rollout = DumpedRollout(
            name=trajectory.lineage.rollout_id,
            token_ids=trajectory.token_ids,
            sampled=trajectory.sampled,
            rollout_logprobs=trajectory.rollout_logprobs,
            temperatures=trajectory.temperatures,
            top_ps=top_ps,
            policy_versions=trajectory.policy_versions,
            turns=turns,
            expert_ids=trajectory.expert_ids.astype(np.int32),
            routed=trajectory.routed,
            kept=trajectory.kept,
            group=trajectory.lineage.group_id,
            engine=trajectory.engine_id,
            step=step,
            prompt=prompt,
            response=response,
            rewards=trajectory.rewards,
            finish_reason=str(trajectory.finish_reason),
            kept_logmass=trajectory.kept_logmass,
            trajectory=trajectory,
        )
        yield reading.unique(rollout)


def step_of(file: Path) -> int:
    """Returns the step that a run dumped into this file; -1 if its name is none of a step."""
    named = re.fullmatch(r"step-(\d{1,9})", file.stem)
    return int(named[1]) if named else -1
