"""Invariants of the two recorded supports: kept sets (which tokens could be drawn) and expert ids (which experts ran).

Called by `moerl.contract.invariants` only, after dtypes, shapes and turns were found right. Sized for 32K tokens of
48 layers x top-8: a few milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.reasons import Reason
from moerl.errors import ContractError

if TYPE_CHECKING:
    from moerl.contract.trajectory import SamplingParams, Trajectory

SINGLETON_LOGPROB_TOLERANCE = 1e-6
"""A kept set of one id is drawn with probability one; float32 rounding of a renormalised weight is allowed for."""

_CHUNK_BYTES = 1 << 19
"""Working set of one step of the distinctness check; stays in the L2 cache."""


def refuse_where(bad: NDArray[np.bool_], reason: Reason, *, field: str, values: NDArray[Any], expected: str) -> None:
    """Raises `ContractError` naming the first index at which `bad` is True, and how many there are."""
    if not bad.any():
        return
    index = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    where = index[0] if len(index) == 1 else index
    raise ContractError(
        reason,
        field=field,
        seen=f"{values[index]} at index {where} ({int(bad.sum())} of {bad.size} wrong)",
        expected=expected,
    )


def check_kept_sets(trajectory: Trajectory) -> None:
    """The CSR structure, the ids, and that each truncated token was drawn from its own kept set.

    Raises:
        ContractError: With the reason code of the first invariant that fails.
    """
    _check_offsets(trajectory)
    sizes = trajectory.kept.sizes
    _check_truncation(trajectory, sizes)
    _check_kept_ids(trajectory, sizes)
    singleton = (sizes == 1) & (trajectory.rollout_logprobs < -SINGLETON_LOGPROB_TOLERANCE)
    refuse_where(
        singleton,
        Reason.SINGLETON_LOGPROB_NOT_ZERO,
        field="rollout_logprobs",
        values=trajectory.rollout_logprobs,
        expected="0: the kept set holds one id, so it was drawn with probability one",
    )


def _check_offsets(trajectory: Trajectory) -> None:
    offsets, num_ids = trajectory.kept.offsets, len(trajectory.kept.ids)
    if offsets[0] != 0:
        raise ContractError(Reason.OFFSETS_NOT_FROM_ZERO, field="kept.offsets", seen=offsets[0], expected=0)
    refuse_where(
        offsets[1:] < offsets[:-1],
        Reason.OFFSETS_FALL,
        field="kept.offsets",
        values=offsets[1:],
        expected="offsets that never fall",
    )
    if offsets[-1] != num_ids:
        raise ContractError(Reason.OFFSETS_END_WRONG, field="kept.offsets", seen=offsets[-1], expected=num_ids)


def _check_truncation(trajectory: Trajectory, sizes: NDArray[np.int64]) -> None:
    """Which tokens list a kept set, and how long it may be, given how their turn was sampled."""
    truncated, largest = trajectory.truncated, np.zeros(len(trajectory), np.int64)
    for turn in trajectory.turns:
        if turn.sampling is not None:
            largest[turn.start : turn.end] = _largest_kept_set(turn.sampling)
    refuse_where(
        truncated & ~trajectory.sampled,
        Reason.TRUNCATED_NOT_SAMPLED,
        field="truncated",
        values=truncated,
        expected="False where not sampled",
    )
    refuse_where(
        truncated & (largest == 0),
        Reason.TRUNCATED_UNDER_FULL_SAMPLING,
        field="truncated",
        values=truncated,
        expected="False where the sampling parameters cut nothing",
    )
    # With fewer ids allowed than the vocabulary has, something was cut: silence would read as "everything".
    refuse_where(
        ~truncated & (largest > 0) & (largest < trajectory.spec.vocab_size),
        Reason.KEPT_SET_MISSING,
        field="truncated",
        values=truncated,
        expected="True: the sampling parameters of the turn leave fewer ids than the vocabulary has",
    )
    refuse_where(
        truncated & (sizes == 0), Reason.KEPT_SET_EMPTY, field="kept", values=sizes, expected="at least one id"
    )
    refuse_where(
        ~truncated & (sizes > 0),
        Reason.KEPT_SET_NOT_TRUNCATED,
        field="kept",
        values=sizes,
        expected="no ids where not truncated",
    )
    refuse_where(
        sizes > largest,
        Reason.KEPT_SET_TOO_LARGE,
        field="kept",
        values=sizes,
        expected="at most the top-k of the turn (1 where greedy)",
    )


def _largest_kept_set(sampling: SamplingParams) -> int:
    """The most ids a kept set may list; 0 where the parameters cut nothing."""
    return 1 if sampling.is_greedy else sampling.effective_top_k or 0


def _check_kept_ids(trajectory: Trajectory, sizes: NDArray[np.int64]) -> None:
    ids, vocab_size = trajectory.kept.ids, trajectory.spec.vocab_size
    if not len(ids):
        return
    refuse_where(
        (ids < 0) | (ids >= vocab_size),
        Reason.KEPT_ID_OUT_OF_RANGE,
        field="kept.ids",
        values=ids,
        expected=f"in [0, {vocab_size})",
    )
    starts_row = np.zeros(len(ids), np.bool_)
    starts_row[trajectory.kept.offsets[:-1][sizes > 0]] = True
    refuse_where(
        (ids[1:] <= ids[:-1]) & ~starts_row[1:],
        Reason.KEPT_IDS_UNSORTED,
        field="kept.ids",
        values=ids[1:],
        expected="strictly ascending ids in a row",
    )
    # Ids of a row are distinct by now, so a row holds its token at most once: counting finds every miss.
    drawn = np.repeat(trajectory.token_ids, sizes) == ids
    if int(np.count_nonzero(drawn)) != int(np.count_nonzero(trajectory.truncated)):
        holds_token = np.zeros(len(trajectory), np.bool_)
        holds_token[np.repeat(np.arange(len(trajectory)), sizes)[drawn]] = True
        refuse_where(
            trajectory.truncated & ~holds_token,
            Reason.SAMPLED_TOKEN_NOT_KEPT,
            field="kept.ids",
            values=trajectory.token_ids,
            expected="the sampled token in its own kept set",
        )


def check_expert_ids(trajectory: Trajectory) -> None:
    """Range and distinctness of expert ids; rows that were not captured hold zeros and nothing else.

    An MoE layer of zeros repeats expert 0 and is refused under its own reason. With K = 1 a layer that used expert 0
    throughout cannot be told from one that was never filled, and is accepted.

    Raises:
        ContractError: With the reason code of the first invariant that fails.
    """
    expert_ids, routed, spec = trajectory.expert_ids, trajectory.routed, trajectory.spec
    if int(expert_ids.max()) >= spec.num_experts:
        refuse_where(
            expert_ids >= spec.num_experts,
            Reason.EXPERT_ID_OUT_OF_RANGE,
            field="expert_ids",
            values=expert_ids,
            expected=f"in [0, {spec.num_experts})",
        )
    if not routed.all():
        refuse_where(
            ~routed & expert_ids.any(axis=(1, 2)),
            Reason.UNROUTED_ROW_NOT_ZERO,
            field="expert_ids",
            values=routed,
            expected="zeros in rows that were not captured",
        )
        expert_ids = expert_ids[routed]
    if expert_ids.size and not rows_are_distinct(expert_ids):
        _explain_repeats(expert_ids, np.flatnonzero(routed))


def rows_are_distinct(expert_ids: NDArray[Any]) -> bool:
    """True where the K ids of every row differ: all pairs compared, plane against plane, a cache-full at a time."""
    top_k = expert_ids.shape[2]
    flat = expert_ids.reshape(-1, top_k)
    step = max(1, _CHUNK_BYTES // (top_k * flat.itemsize))
    equal = np.empty((top_k, step), np.bool_)
    for start in range(0, len(flat), step):
        planes = np.ascontiguousarray(flat[start : start + step].T)
        for shift in range(1, top_k):
            out = equal[: top_k - shift, : planes.shape[1]]
            if np.equal(planes[shift:], planes[:-shift], out=out).any():
                return False
    return True


def _explain_repeats(expert_ids: NDArray[Any], row_of: NDArray[np.int64]) -> None:
    """Raises for routed rows that repeat an expert; `row_of` maps rows of `expert_ids` to rows of the trajectory."""
    zero_layers = np.flatnonzero(~expert_ids.any(axis=(0, 2)))
    if len(zero_layers):
        raise ContractError(
            Reason.MOE_LAYER_OF_ZEROS,
            field="expert_ids",
            seen=f"MoE layer {zero_layers[0]} holds expert 0 alone ({len(zero_layers)} such layers)",
            expected="captured routing for every MoE layer",
        )
    in_order = np.sort(expert_ids, axis=2)
    repeated = (in_order[:, :, 1:] == in_order[:, :, :-1]).any(axis=2)
    row, layer = (int(i) for i in np.unravel_index(int(repeated.argmax()), repeated.shape))
    raise ContractError(
        Reason.REPEATED_EXPERT,
        field="expert_ids",
        seen=f"{expert_ids[row, layer].tolist()} in row {row_of[row]}, MoE layer {layer}",
        expected="distinct experts in a row",
    )
