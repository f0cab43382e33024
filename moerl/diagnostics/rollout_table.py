"""A table of the rollouts of a diagnosis, one row each, next to the report. Torch-free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moerl.diagnostics.causes.diagnosis import Diagnosis
from moerl.diagnostics.causes.gaps import Assumption
from moerl.diagnostics.causes.routes import Place, compare
from moerl.diagnostics.trainer_side import sampled_gaps


def write_rollout_table(diagnosis: Diagnosis, path: Path) -> None:
    """Writes a Parquet file.

    Gaps: mean |d|, nats; gap_trainer: of the trainer's log-probs, null if the dump brings none. route_agreement: mean
    Jaccard of the record as it came with the model's own choice, null if the rollout has no routes. faults: causes.
    step, policy_version: -1 if the dump does not say.
    """
    gaps = diagnosis.gaps
    rollouts = gaps.rollouts
    text, count, nats = pa.string(), pa.int32(), pa.float64()
    trainer = [
        float(np.abs(sampled_gaps(rollout)).mean()) if rollout.trainer_logprobs else None for rollout in rollouts
    ]
    agreement = [
        None
        if rollout.expert_ids is None
        else compare([rollout], {rollout.name: own}, Place()).mean(range(len(own[0])))
        for rollout, own in zip(rollouts, gaps.own_ids(diagnosis.as_recorded), strict=True)
    ]
    faults = [
        list(dict.fromkeys(fault.cause for fault in diagnosis.faults if fault.of_R[number]))
        for number in range(len(rollouts))
    ]
    columns = {
        "rollout": pa.array([rollout.name for rollout in rollouts], text),
        "group": pa.array([rollout.group for rollout in rollouts], text),
        "engine": pa.array([rollout.engine for rollout in rollouts], text),
        "step": pa.array([rollout.step for rollout in rollouts], count),
        "policy_version": pa.array([int(rollout.policy_versions.max()) for rollout in rollouts], count),
        "tokens": pa.array(map(len, rollouts), count),
        "sampled_tokens": pa.array([rollout.num_sampled for rollout in rollouts], count),
        "gap_nothing_kept": pa.array(gaps.differences([Assumption()] * len(rollouts)).means, nats),
        "gap_as_recorded": pa.array(gaps.differences(diagnosis.as_recorded).means, nats),
        "gap_repaired": pa.array(gaps.differences(diagnosis.final).means, nats),
        "gap_trainer": pa.array(trainer, nats),
        "route_agreement": pa.array(agreement, nats),
        "faults": pa.array(faults, pa.list_(text)),
    }
    pq.write_table(pa.table(columns), path)
