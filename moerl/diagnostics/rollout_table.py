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

SCHEMA = pa.schema(
    [
        pa.field("rollout", pa.string()),
        pa.field("group", pa.string()),
        pa.field("engine", pa.string()),
        pa.field("step", pa.int32()),
        pa.field("policy_version", pa.int32()),
        pa.field("tokens", pa.int32()),
        pa.field("sampled_tokens", pa.int32()),
        pa.field("gap_nothing_kept", pa.float64()),
        pa.field("gap_as_recorded", pa.float64()),
        pa.field("gap_repaired", pa.float64()),
        pa.field("gap_trainer", pa.float64()),
        pa.field("route_agreement", pa.float64()),
        pa.field("faults", pa.list_(pa.string())),
    ]
)
"""Gaps: mean |d|, nats; gap_trainer: of the trainer's log-probs, null if the dump brings none. route_agreement: mean
Jaccard of the record as it came with the model's own choice, null if the rollout has no routes. faults: causes. step,
policy_version: -1 if the dump does not say."""


def write_rollout_table(diagnosis: Diagnosis, path: Path) -> None:
    """Writes a Parquet file of `SCHEMA`."""
    gaps = diagnosis.gaps
    rollouts = gaps.rollouts
    columns: dict[str, object] = {
        "rollout": [rollout.name for rollout in rollouts],
        "group": [rollout.group for rollout in rollouts],
        "engine": [rollout.engine for rollout in rollouts],
        "step": [rollout.step for rollout in rollouts],
        "policy_version": [int(rollout.policy_versions.max()) for rollout in rollouts],
        "tokens": list(map(len, rollouts)),
        "sampled_tokens": [rollout.num_sampled for rollout in rollouts],
        "gap_nothing_kept": gaps.differences(gaps.plan(Assumption())).means,
        "gap_as_recorded": gaps.differences(diagnosis.as_recorded).means,
        "gap_repaired": gaps.differences(diagnosis.final).means,
        "gap_trainer": [
            float(np.abs(sampled_gaps(rollout)).mean()) if rollout.trainer_logprobs else None for rollout in rollouts
        ],
        "route_agreement": [
            None
            if rollout.expert_ids is None
            else compare([rollout], {rollout.name: own}, Place()).mean(range(len(own[0])))
            for rollout, own in zip(rollouts, gaps.own_ids(diagnosis.as_recorded), strict=True)
        ],
        "faults": [
            list(dict.fromkeys(fault.cause for fault in diagnosis.faults if fault.of_R[number]))
            for number in range(len(rollouts))
        ],
    }
    pq.write_table(pa.table(columns, schema=SCHEMA), path)
