"""Input rows of one sequence, in the layout of `moerl.contract.batch.Microbatch`, and their concatenation.

Everything that describes the token after a row is shifted here, once: row t holds input token t and what
belongs to target token t + 1. Pure numpy; runs in the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.kept import concat_kept_sets, slice_kept_sets
from moerl.contract.reasons import Reason
from moerl.contract.routing import rollout_key, routing_checksums
from moerl.contract.trajectory import KeptSets, ModelSpec, Trajectory
from moerl.errors import ContractError, ReplayError


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One sequence of T input rows. Fields as in `Microbatch`, over this sequence alone; `key` is its
    salt."""

    input_ids: NDArray[np.integer]
    target_ids: NDArray[np.integer]
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    rollout_logprobs: NDArray[np.float32]
    kept_logmass: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    kept: KeptSets
    truncated: NDArray[np.bool_]
    sample_index: int
    routed: NDArray[np.bool_]
    expert_ids: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    checksums: NDArray[np.uint64] | None = None
    key: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


def trajectory_rows(sample: TrainSample, sample_index: int, *, replay: bool, uncaptured: str = "reject") -> Rows:
    """The S - 1 rows of a trajectory, with its routing and their checksums where `replay`.

    uncaptured: what happens to rows without captured routing, as in `pack_for_ranks`.
    """
    trajectory = sample.trajectory
    _check_trainable(sample)
    if replay and uncaptured == "reject":
        _check_routed(trajectory)
    key = rollout_key(trajectory.lineage.rollout_id)
    return Rows(
        input_ids=trajectory.token_ids[:-1],
        target_ids=trajectory.token_ids[1:],
        loss_mask=trajectory.sampled[1:],
        advantages=sample.advantages[1:],
        rollout_logprobs=trajectory.rollout_logprobs[1:],
        kept_logmass=trajectory.kept_logmass[1:],
        temperatures=trajectory.temperatures[1:],
        kept=slice_kept_sets(trajectory.kept, 1, len(trajectory)),
        truncated=trajectory.truncated[1:],
        sample_index=sample_index,
        routed=trajectory.routed,
        expert_ids=trajectory.expert_ids if replay else None,
        checksums=routing_checksums(key, trajectory.expert_ids, trajectory.routed) if replay else None,
        key=key,
    )


def text_rows(sample: TextSample, sample_index: int) -> Rows:
    """The S - 1 rows of a supervised sequence."""
    num_tokens = len(sample.token_ids)
    if num_tokens < 2:
        raise ContractError(
            Reason.TOO_SHORT,
            field="token_ids",
            seen=f"{num_tokens} tokens",
            expected="at least 2",
            remedy="leave empty texts out of the supervised data",
        )
    if sample.loss_mask.shape != sample.token_ids.shape:
        raise ContractError(
            Reason.WRONG_SHAPE,
            field="loss_mask",
            seen=sample.loss_mask.shape,
            expected=sample.token_ids.shape,
            remedy="give one mask value per token",
        )
    if sample.loss_mask[0]:
        raise ContractError(
            Reason.FIRST_TOKEN_SAMPLED,
            field="loss_mask",
            seen="the first token is to be learned",
            expected="False: nothing comes before it to predict it from",
            remedy="begin with a prompt of at least one token",
        )
    return _plain_rows(sample.token_ids[:-1], sample.token_ids[1:], sample.loss_mask[1:], sample_index)


def pad_rows(num_rows: int, spec: ModelSpec | None) -> Rows:
    """A sequence of pad rows; with routing where `spec` is given.

    Row i has experts ``(i * K + k) mod E``: distinct within the row, since dropless dispatch counts on K of
    them, and spread evenly over all, since pad rows that meet on a few experts run these out of memory.
    """
    zeros = np.zeros(num_rows, np.int64)
    rows = _plain_rows(zeros, zeros, np.zeros(num_rows, np.bool_), sample_index=-1)
    if spec is None:
        return rows
    num_slots = num_rows * spec.experts_per_token
    slots = (np.arange(num_slots) % spec.num_experts).astype(spec.expert_dtype)
    per_layer = slots.reshape(num_rows, 1, spec.experts_per_token)
    return replace(
        rows,
        expert_ids=np.repeat(per_layer, spec.num_moe_layers, axis=1),
        checksums=np.zeros(spec.num_moe_layers, np.uint64),
    )


def concatenate(sequences: Sequence[Rows]) -> Microbatch:
    """One microbatch of the sequences in their order; a pad sequence is one whose sample index is -1."""
    lengths = np.array([len(rows) for rows in sequences])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    sample_index = np.repeat([rows.sample_index for rows in sequences], lengths)
    return Microbatch(
        input_ids=_joined(sequences, "input_ids", np.int64),
        target_ids=_joined(sequences, "target_ids", np.int64),
        position_ids=np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths),
        cu_seqlens=cu_seqlens.astype(np.int32),
        loss_mask=_joined(sequences, "loss_mask", np.bool_),
        is_pad=sample_index < 0,
        advantages=_joined(sequences, "advantages", np.float32),
        rollout_logprobs=_joined(sequences, "rollout_logprobs", np.float32),
        kept_logmass=_joined(sequences, "kept_logmass", np.float32),
        temperatures=_joined(sequences, "temperatures", np.float32),
        kept=concat_kept_sets([rows.kept for rows in sequences]),
        truncated=_joined(sequences, "truncated", np.bool_),
        sample_index=sample_index.astype(np.int32),
        routed=_joined(sequences, "routed", np.bool_),
        expert_ids=_joined_experts(sequences),
        routing_checksums=_summed_checksums(sequences),
        rollout_keys=np.array([rows.key for rows in sequences], np.uint64),
    )


def _plain_rows(
    input_ids: NDArray[np.integer],
    target_ids: NDArray[np.integer],
    loss_mask: NDArray[np.bool_],
    sample_index: int,
) -> Rows:
    """Rows that no trajectory stands behind."""
    num_rows = len(input_ids)
    zeros = np.zeros(num_rows, np.float32)
    return Rows(
        input_ids=input_ids,
        target_ids=target_ids,
        loss_mask=loss_mask,
        advantages=zeros,
        rollout_logprobs=zeros,
        kept_logmass=zeros,
        temperatures=np.ones(num_rows, np.float32),
        kept=KeptSets.empty(num_rows),
        truncated=np.zeros(num_rows, np.bool_),
        sample_index=sample_index,
        routed=np.ones(num_rows, np.bool_),
    )


def _check_trainable(sample: TrainSample) -> None:
    trajectory, advantages = sample.trajectory, sample.advantages
    if advantages.shape != (len(trajectory),) or advantages.dtype != np.float32:
        raise ContractError(
            Reason.WRONG_SHAPE,
            field="advantages",
            seen=f"{advantages.dtype} {advantages.shape}",
            expected=f"float32 {(len(trajectory),)}, one per token of rollout {trajectory.lineage.rollout_id}",
            remedy="attach advantages to every token of the trajectory",
        )
    if not np.isfinite(advantages).all():
        raise ContractError(
            Reason.VALUE_NOT_FINITE,
            field="advantages",
            seen=f"{int((~np.isfinite(advantages)).sum())} values of rollout {trajectory.lineage.rollout_id}",
            expected="finite advantages",
            remedy="look at the rewards of its group",
        )
    if (trajectory.temperatures <= 0).any():
        raise ContractError(
            Reason.SAMPLING_INVALID,
            field="turns",
            seen=f"greedy tokens in rollout {trajectory.lineage.rollout_id}",
            expected="temperature > 0: a greedy choice has no probability to train on",
            remedy="set rollout.temperature above 0",
        )


def _check_routed(trajectory: Trajectory) -> None:
    num_missing = int((~trajectory.routed).sum())
    if num_missing:
        raise ReplayError(
            f"rollout {trajectory.lineage.rollout_id} cannot be replayed",
            seen=f"{num_missing} of {len(trajectory.routed)} rows without captured routing",
            expected="captured routing in every row",
            remedy="drop the rollout, or find out why its engine did not capture these rows",
        )


def _joined(sequences: Sequence[Rows], name: str, dtype: Any) -> NDArray[Any]:
    return np.concatenate([getattr(rows, name) for rows in sequences], dtype=dtype)


def _joined_experts(sequences: Sequence[Rows]) -> NDArray[Any] | None:
    parts = [rows.expert_ids for rows in sequences if rows.expert_ids is not None]
    assert len(parts) in (0, len(sequences)), "routing is attached to all sequences or to none"
    return np.concatenate(parts) if parts else None


def _summed_checksums(sequences: Sequence[Rows]) -> NDArray[np.uint64] | None:
    parts = [rows.checksums for rows in sequences if rows.checksums is not None]
    return np.sum(parts, axis=0, dtype=np.uint64) if parts else None
