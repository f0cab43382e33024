"""Rollouts of dumps as records that the contract checks before they are trained. numpy only; any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.ports import RolloutRecord
from moerl.contract.reasons import Reason
from moerl.contract.requirements import require_scores
from moerl.contract.trajectory import (
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    Trajectory,
    Turn,
    TurnKind,
)
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import ContractError

_FIELDS = tuple(field.name for field in fields(Trajectory))


def record_of(
    rollout: DumpedRollout, spec: ModelSpec, sampling: SamplingParams, scores: Sequence[str] = ()
) -> RolloutRecord:
    """Returns the record of a rollout, for a quarantine to admit. Nothing is made up: fields that the dump does not
    have are missing, and rows without routes count as not captured.

    Args:
        spec: the model's, for dumps that do not name theirs.
        sampling: for dumps that do not say how they were sampled; top-k and min-p for all that are not ours.
        scores: names of the side scores that the rollout must have.

    Raises:
        ContractError: `expert_id_out_of_range`, of an id that none of the model's experts has; `missing_field`, if
            there is no reward, or one of the scores is missing.
    """
    if "reward" not in rollout.rewards:
        raise ContractError(
            Reason.MISSING_FIELD,
            field="rewards",
            seen=", ".join(rollout.rewards) or "none",
            expected="a number named reward",
        )
    if rollout.trajectory is not None:
        values = {name: getattr(rollout.trajectory, name) for name in _FIELDS}
    else:
        values = _values(rollout, spec, sampling)
    require_scores(values.get("scores", {}), scores)
    return RolloutRecord(rollout.name, values["engine_id"], int(rollout.policy_versions.max()), values)


def _values(rollout: DumpedRollout, spec: ModelSpec, sampling: SamplingParams) -> dict[str, Any]:
    kept = rollout.kept or KeptSets.empty(len(rollout))
    truncated = kept.sizes > 0
    values: dict[str, Any] = {
        "spec": spec,
        # Prompts have no other name in these dumps than that of the group that answers them.
        "lineage": Lineage(rollout.name, rollout.group, rollout.group),
        "turns": tuple(_turns(rollout, sampling)),
        "token_ids": rollout.token_ids,
        "sampled": rollout.sampled,
        "rollout_logprobs": rollout.rollout_logprobs,
        "policy_versions": rollout.policy_versions,
        "kept": kept,
        "truncated": truncated,
        "rewards": dict(rollout.rewards),
        "engine_id": rollout.engine or "dump",
        **_routes(rollout, spec),
    }
    if rollout.kept_logmass is not None:
        values["kept_logmass"] = rollout.kept_logmass
    elif not truncated.any():
        values["kept_logmass"] = np.zeros(len(rollout), np.float32)
    if rollout.finish_reason in {str(reason) for reason in FinishReason}:
        values["finish_reason"] = FinishReason(rollout.finish_reason)
    return values


def _turns(rollout: DumpedRollout, sampling: SamplingParams) -> list[Turn]:
    """Returns a turn for each number; a turn whose settings change within it becomes several."""
    settings = np.stack([rollout.turns, rollout.sampled, rollout.temperatures, rollout.top_ps])
    starts = [0, *(np.flatnonzero((settings[:, 1:] != settings[:, :-1]).any(axis=0)) + 1).tolist(), len(rollout)]
    turns: list[Turn] = []
    for start, end in pairwise(starts):
        if not rollout.sampled[start]:
            turns.append(Turn(start, end, TurnKind.OBSERVATION if turns else TurnKind.PROMPT))
            continue
        said = sampling
        if rollout.says_temperature:
            said = replace(said, temperature=float(rollout.temperatures[start]))
        if rollout.says_top_p:
            said = replace(said, top_p=float(rollout.top_ps[start]))
        turns.append(Turn(start, end, TurnKind.SAMPLED, replace(said, seed=0)))
    return turns


def _routes(rollout: DumpedRollout, spec: ModelSpec) -> dict[str, NDArray[Any]]:
    if rollout.expert_ids is None:
        shape = (len(rollout) - 1, spec.num_moe_layers, spec.experts_per_token)
        return {"expert_ids": np.zeros(shape, spec.expert_dtype), "routed": np.zeros(shape[0], np.bool_)}
    found = rollout.expert_ids
    largest = int(found.max()) if found.size else 0
    if largest >= spec.num_experts:
        # A smaller type would make another expert of it.
        raise ContractError(
            Reason.EXPERT_ID_OUT_OF_RANGE, field="expert_ids", seen=largest, expected=f"below {spec.num_experts}"
        )
    return {"expert_ids": found.astype(spec.expert_dtype), "routed": rollout.routed_rows}
