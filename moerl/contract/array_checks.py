"""Invariants of kept sets and of expert ids: which tokens could be drawn, and which experts ran.

Called by `moerl.contract.invariants`, after dtypes, shapes and turns were found right. Takes a few milliseconds for 32K
tokens of 48 layers x top-8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.fields import TrajectoryFields
from moerl.contract.reasons import Reason
from moerl.contract.requirements import refuse_where, require
from moerl.errors import ContractError

SINGLETON_LOGPROB_TOLERANCE = 1e-6
"""A kept set of one id is drawn with probability one; float32 rounding of a renormalised weight is allowed for."""

_CHUNK_BYTES = 1 << 19
"""Working set of one step of the distinctness check; stays in the L2 cache."""


def check_kept_sets(trajectory: TrajectoryFields) -> None:
    """Checks the CSR structure, the ids, and that each truncated token was drawn from its own kept set.

    Raises:
        ContractError: With the reason code of the first invariant that fails.
    """
    _check_offsets(trajectory)
    sizes = trajectory.kept.sizes
    _check_truncation(trajectory, sizes)
    _check_kept_ids(trajectory, sizes)
    singleton = (sizes == 1) & (trajectory.rollout_logprobs < -SINGLETON_LOGPROB_TOLERANCE)
    expected = "0: the kept set holds one id, so it was drawn with probability one"
    rule = singleton, Reason.SINGLETON_LOGPROB_NOT_ZERO, expected
    refuse_where("rollout_logprobs", trajectory.rollout_logprobs, rule)


def _check_offsets(trajectory: TrajectoryFields) -> None:
    offsets, num_ids = trajectory.kept.offsets, len(trajectory.kept.ids)
    require(offsets[0] == 0, Reason.OFFSETS_NOT_FROM_ZERO, "kept.offsets", offsets[0], 0)
    falls = offsets[1:] < offsets[:-1]
    refuse_where("kept.offsets", offsets[1:], (falls, Reason.OFFSETS_FALL, "offsets that never fall"))
    require(offsets[-1] == num_ids, Reason.OFFSETS_END_WRONG, "kept.offsets", offsets[-1], num_ids)


def _check_truncation(trajectory: TrajectoryFields, sizes: NDArray[np.int64]) -> None:
    """Checks which tokens list a kept set, and how long each set is, given how the turn was sampled."""
    truncated, largest = trajectory.truncated, np.zeros(len(trajectory), np.int64)
    for turn in trajectory.turns:
        if turn.sampling is not None:
            most = 1 if turn.sampling.is_greedy else turn.sampling.effective_top_k or 0
            largest[turn.start : turn.end] = most
    # With fewer ids allowed than the vocabulary has, something was cut: silence would read as "everything".
    silent = ~truncated & (largest > 0) & (largest < trajectory.spec.vocab_size)
    listed = "True: the sampling parameters of the turn leave fewer ids than the vocabulary has"
    uncut = "False if the sampling parameters cut nothing"
    refuse_where(
        "truncated",
        truncated,
        (truncated & ~trajectory.sampled, Reason.TRUNCATED_NOT_SAMPLED, "False on a token that was not sampled"),
        (truncated & (largest == 0), Reason.TRUNCATED_UNDER_FULL_SAMPLING, uncut),
        (silent, Reason.KEPT_SET_MISSING, listed),
    )
    refuse_where(
        "kept",
        sizes,
        (truncated & (sizes == 0), Reason.KEPT_SET_EMPTY, "at least one id"),
        (~truncated & (sizes > 0), Reason.KEPT_SET_NOT_TRUNCATED, "no ids for a token that is not truncated"),
        (sizes > largest, Reason.KEPT_SET_TOO_LARGE, "at most the top-k of the turn (1 if greedy)"),
    )


def _check_kept_ids(trajectory: TrajectoryFields, sizes: NDArray[np.int64]) -> None:
    ids, vocab_size = trajectory.kept.ids, trajectory.spec.vocab_size
    if not len(ids):
        return
    outside = (ids < 0) | (ids >= vocab_size)
    refuse_where("kept.ids", ids, (outside, Reason.KEPT_ID_OUT_OF_RANGE, f"in [0, {vocab_size})"))
    starts_row = np.zeros(len(ids), np.bool_)
    starts_row[trajectory.kept.offsets[:-1][sizes > 0]] = True
    falls = (ids[1:] <= ids[:-1]) & ~starts_row[1:]
    refuse_where("kept.ids", ids[1:], (falls, Reason.KEPT_IDS_UNSORTED, "strictly ascending ids in a row"))
    # Ids of a row are distinct by now, so a row holds its token at most once: counting finds every miss.
    drawn = trajectory.token_ids.repeat(sizes) == ids
    if int(np.count_nonzero(drawn)) != int(np.count_nonzero(trajectory.truncated)):
        holds_token = np.zeros(len(trajectory), np.bool_)
        holds_token[np.repeat(np.arange(len(trajectory)), sizes)[drawn]] = True
        missing = trajectory.truncated & ~holds_token
        rule = missing, Reason.SAMPLED_TOKEN_NOT_KEPT, "the sampled token in its own kept set"
        refuse_where("kept.ids", trajectory.token_ids, rule)


def check_expert_ids(trajectory: TrajectoryFields) -> None:
    """Checks range and distinctness of expert ids; rows that were not captured hold zeros and nothing else.

    An MoE layer of zeros repeats expert 0 and is refused under its own reason. With K = 1 a layer that used expert 0
    throughout looks like one that was never filled, and is accepted.

    Raises:
        ContractError: With the reason code of the first invariant that fails.
    """
    expert_ids, routed, spec = trajectory.expert_ids, trajectory.routed, trajectory.spec
    if int(expert_ids.max()) >= spec.num_experts:
        rule = expert_ids >= spec.num_experts, Reason.EXPERT_ID_OUT_OF_RANGE, f"in [0, {spec.num_experts})"
        refuse_where("expert_ids", expert_ids, rule)
    if not routed.all():
        filled = ~routed & expert_ids.any(axis=(1, 2))
        rule = filled, Reason.UNROUTED_ROW_NOT_ZERO, "zeros in rows that were not captured"
        refuse_where("expert_ids", routed, rule)
        expert_ids = expert_ids[routed]
    if expert_ids.size and not rows_are_distinct(expert_ids):
        _explain_repeats(expert_ids, np.flatnonzero(routed))


def rows_are_distinct(expert_ids: NDArray[Any]) -> bool:
    """Returns True if the K ids of every row differ: all pairs compared, plane against plane, a cache-full at a
    time."""
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
        seen = f"MoE layer {zero_layers[0]} holds expert 0 alone ({len(zero_layers)} such layers)"
        expected = "captured routing for every MoE layer"
        raise ContractError(Reason.MOE_LAYER_OF_ZEROS, field="expert_ids", seen=seen, expected=expected)
    in_order = np.sort(expert_ids, axis=2)
    repeated = (in_order[:, :, 1:] == in_order[:, :, :-1]).any(axis=2)
    row, layer = (int(i) for i in np.unravel_index(int(repeated.argmax()), repeated.shape))
    seen = f"{expert_ids[row, layer].tolist()} in row {row_of[row]}, MoE layer {layer}"
    raise ContractError(Reason.REPEATED_EXPERT, field="expert_ids", seen=seen, expected="distinct experts in a row")
