"""Input rows of one sequence, in the layout of `moerl.contract.batch.Microbatch`, and the microbatch of several.

Everything that describes the token after a row is shifted here, once: row t holds input token t and what belongs to
target token t + 1. Pad rows are added here and nowhere else. Pure numpy; runs in the controller
and in offline commands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.batch import UNSCORED, Microbatch, TextSample, TrainSample, unscored
from moerl.contract.batch_checksums import Recorded, context_checksum, kept_checksum
from moerl.contract.parallel import ParallelDims
from moerl.contract.reasons import Reason
from moerl.contract.requirements import require_scores
from moerl.contract.routing import rollout_key, summed_checksums
from moerl.contract.trajectory import KeptSets, ModelSpec
from moerl.errors import ContractError, ReplayError


@dataclass(frozen=True, slots=True)
class Padding:
    """Multiples of rows that a layout needs."""

    sequence: int = 1
    """Every sequence is padded at its own end to a multiple of this."""
    total: int = 1
    """A microbatch is padded with a last sequence of pad rows to a multiple of this (and of `sequence`)."""

    @classmethod
    def of(cls, dims: ParallelDims) -> Padding:
        """Returns the padding of a layout."""
        return cls(sequence=dims.sequence_multiple, total=dims.tensor)

    @property
    def unit(self) -> int:
        """Rows of every microbatch are a multiple of this, at least one."""
        return math.lcm(self.sequence, self.total)

    def padded(self, num_rows: int) -> int:
        """Returns the rows of a sequence of `num_rows` with the pad rows at its end."""
        return num_rows + -num_rows % self.sequence


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """One sequence of T input rows. Fields are those of `Microbatch`, over this sequence alone."""

    input_ids: NDArray[np.integer]
    """int [T]."""
    target_ids: NDArray[np.integer]
    """int [T]."""
    loss_mask: NDArray[np.bool_]
    """bool [T]."""
    advantages: NDArray[np.float32]
    """float32 [T]."""
    rollout_logprobs: NDArray[np.float32]
    """float32 [T]."""
    versions: NDArray[np.integer]
    """int [T]."""
    temperatures: NDArray[np.float32]
    """float32 [T]."""
    kept: KeptSets
    """CSR over T rows."""
    truncated: NDArray[np.bool_]
    """bool [T]."""
    sample_index: int
    """Index of the sample of all rows."""
    routed: NDArray[np.bool_]
    """bool [T]."""
    recorded: Recorded
    """The sequence that checksums are computed from; not packed."""
    expert_ids: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """uint8/uint16 [T, L, K]; None without replay."""
    scores: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """By name float32 [T]; side scores of the target, 0 if it was not sampled."""
    prefix: int = -1
    """Index of the sequence of the microbatch that comes before this one, or -1."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def until(self, stop: int, key: int) -> SequenceRows:
        """Returns the rows before `stop`, none of which is scored, as a sequence of their own under the salt `key`."""
        recorded = Recorded(key, self.recorded.tokens[:stop], KeptSets.empty(0))
        return self._part(slice(0, stop), recorded=recorded)

    def after(self, start: int, prefix: int, key: int) -> SequenceRows:
        """Returns the rows from `start` on, which go on behind as many of the sequence `prefix` of the salt `key`."""
        recorded = replace(self.recorded, num_shared=start, shared_key=key)
        return self._part(slice(start, len(self)), recorded=recorded, prefix=prefix)

    def _part(self, rows: slice, **changes: Any) -> SequenceRows:
        parts = {name: getattr(self, name)[rows] for name in _PER_ROW}
        experts = None if self.expert_ids is None else self.expert_ids[rows]
        kept = self.kept.cut(rows.start, rows.stop)
        scores = {name: values[rows] for name, values in self.scores.items()}
        return replace(self, **parts, kept=kept, expert_ids=experts, scores=scores, **changes)


_PER_ROW: dict[str, tuple[type[np.generic], float]] = {
    "input_ids": (np.int64, 0),
    "target_ids": (np.int64, 0),
    "loss_mask": (np.bool_, False),
    **UNSCORED,
    "routed": (np.bool_, True),
}
"""Fields of `SequenceRows` with a number for each row: the dtype in a microbatch, and the number on pad rows."""


def trajectory_rows(
    sample: TrainSample, sample_index: int, *, replay: bool, uncaptured: str = "reject", scores: Sequence[str] = ()
) -> SequenceRows:
    """Returns the S - 1 rows of a trajectory, with its routing if `replay`.

    uncaptured: treatment of rows without captured routing, as in `pack_for_ranks`. scores: names of the side scores
    that rows carry.
    """
    trajectory = sample.trajectory
    _check_trainable(sample, scores)
    num_missing = int((~trajectory.routed).sum())
    if replay and uncaptured == "reject" and num_missing:
        raise ReplayError(
            f"rollout {trajectory.lineage.rollout_id} cannot be replayed",
            seen=f"{num_missing} of {len(trajectory.routed)} rows without captured routing",
            expected="captured routing in every row",
            remedy="drop the rollout, or find out why its engine did not capture these rows",
        )
    return SequenceRows(
        input_ids=trajectory.token_ids[:-1],
        target_ids=trajectory.token_ids[1:],
        loss_mask=trajectory.sampled[1:],
        advantages=sample.advantages[1:],
        rollout_logprobs=trajectory.rollout_logprobs[1:],
        versions=trajectory.policy_versions[1:],
        temperatures=trajectory.temperatures[1:],
        kept=trajectory.kept.cut(1, len(trajectory)),
        truncated=trajectory.truncated[1:],
        sample_index=sample_index,
        routed=trajectory.routed,
        recorded=Recorded(rollout_key(trajectory.lineage.rollout_id), trajectory.token_ids[:-1], trajectory.kept),
        expert_ids=trajectory.expert_ids if replay else None,
        scores={name: np.where(trajectory.sampled, trajectory.scores[name], np.float32(0))[1:] for name in scores},
    )


def text_rows(sample: TextSample, sample_index: int) -> SequenceRows:
    """Returns the S - 1 rows of a supervised sequence."""
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
    num_rows, input_ids = num_tokens - 1, sample.token_ids[:-1]
    return SequenceRows(
        input_ids=input_ids,
        target_ids=sample.token_ids[1:],
        loss_mask=sample.loss_mask[1:],
        **unscored(num_rows),
        kept=KeptSets.empty(num_rows),
        sample_index=sample_index,
        routed=np.ones(num_rows, np.bool_),
        recorded=Recorded(0, input_ids, KeptSets.empty(0)),
    )


def build_microbatch(
    sequences: Sequence[SequenceRows], padding: Padding, spec: ModelSpec | None, scores: Sequence[str] = ()
) -> Microbatch:
    """Returns one microbatch of the sequences in their order, padded; without sequences it has pad rows alone.

    Pad rows at the end of a sequence belong to it: positions go on, and the key is that of the sequence. Over the whole
    microbatch, pad row i has experts ``(i * K + k) mod E``: distinct within the row, since dropless dispatch counts on
    K of them, and spread evenly over all, since pad rows that meet on a few experts run these out of memory.

    Args:
        spec: the model whose routing is attached to every sequence; None if none is attached.
        scores: names of the side scores that every sequence has.
    """
    lengths = [padding.padded(len(rows)) for rows in sequences]
    origins = [(rows.recorded.key, rows.recorded.num_shared, rows.prefix) for rows in sequences]
    num_last = -sum(lengths) % padding.unit if sequences else padding.unit
    if num_last:
        lengths, origins = [*lengths, num_last], [*origins, (0, 0, -1)]
    key_of, first_of, prefix_of = zip(*origins, strict=True)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    sample_index = np.full(int(cu_seqlens[-1]), -1, np.int32)
    for rows, start in zip(sequences, cu_seqlens, strict=False):
        sample_index[start : start + len(rows)] = rows.sample_index
    is_pad = sample_index < 0

    def fill(out: NDArray[Any], parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Writes the rows of the sequences, one behind the other, to all rows but pad rows."""
        if parts:
            out[~is_pad] = np.concatenate(parts)
        return out

    per_row: dict[str, Any] = {
        name: fill(np.full(len(is_pad), value, dtype), [getattr(rows, name) for rows in sequences])
        for name, (dtype, value) in _PER_ROW.items()
    }
    num_kept = fill(np.zeros(len(is_pad), np.int64), [rows.kept.sizes for rows in sequences])
    kept_ids = np.concatenate([np.zeros(0, np.int32), *(rows.kept.ids for rows in sequences)])
    expert_ids, checksums = (None, None) if spec is None else _routing(sequences, is_pad, spec)
    return Microbatch(
        **per_row,
        position_ids=np.arange(len(is_pad)) - np.repeat(cu_seqlens[:-1] - first_of, lengths),
        cu_seqlens=cu_seqlens.astype(np.int32),
        is_pad=is_pad,
        kept=KeptSets(np.concatenate([[0], np.cumsum(num_kept)]), kept_ids),
        sample_index=sample_index,
        scores={
            name: fill(np.zeros(len(is_pad), np.float32), [rows.scores[name] for rows in sequences]) for name in scores
        },
        expert_ids=expert_ids,
        routing_checksums=checksums,
        rollout_keys=np.array(key_of, np.uint64),
        prefix_of=np.array(prefix_of, np.int32) if max(prefix_of) >= 0 else None,
        prefix_rows=np.array(first_of, np.int32) if max(prefix_of) >= 0 else None,
        context_checksum=context_checksum([rows.recorded for rows in sequences]),
        kept_checksum=kept_checksum([rows.recorded for rows in sequences]),
    )


def _check_trainable(sample: TrainSample, scores: Sequence[str]) -> None:
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
    require_scores(trajectory.scores, scores)
    if any(turn.sampling is not None and turn.sampling.is_greedy for turn in trajectory.turns):
        raise ContractError(
            Reason.SAMPLING_INVALID,
            field="turns",
            seen=f"greedy tokens in rollout {trajectory.lineage.rollout_id}",
            expected="temperature > 0: a greedy choice has no probability to train on",
            remedy="set rollout.temperature above 0",
        )


def _routing(
    sequences: Sequence[SequenceRows], is_pad: NDArray[np.bool_], spec: ModelSpec
) -> tuple[NDArray[Any], NDArray[np.uint64]]:
    """Returns the expert ids of all rows, [T, L, K], and checksums [L] of the routing as recorded, not as packed: they
    are to prove the packed routing."""
    top_k = spec.experts_per_token
    packed = np.empty((len(is_pad), spec.num_moe_layers, top_k), spec.expert_dtype)
    slots = np.arange(int(is_pad.sum()) * top_k) % spec.num_experts
    packed[is_pad] = slots.reshape(-1, 1, top_k)
    if not sequences:
        return packed, np.zeros(spec.num_moe_layers, np.uint64)
    expert_ids = [rows.expert_ids for rows in sequences if rows.expert_ids is not None]
    assert len(expert_ids) == len(sequences), "routing is attached to all sequences or to none"
    packed[~is_pad] = np.concatenate(expert_ids)
    keys, firsts = [rows.recorded.key for rows in sequences], [rows.recorded.num_shared for rows in sequences]
    return packed, summed_checksums(keys, firsts, expert_ids, [rows.routed for rows in sequences])
