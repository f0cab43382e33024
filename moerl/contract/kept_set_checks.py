"""Invariants of kept sets: which tokens could be drawn.

Called by `moerl.contract.invariants` only, after dtypes, shapes and turns were found right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moerl.contract.demands import refuse_where
from moerl.contract.fields import SamplingParams, TrajectoryFields
from moerl.contract.reasons import Reason
from moerl.errors import ContractError

SINGLETON_LOGPROB_TOLERANCE = 1e-6
"""A kept set of one id is drawn with probability one; float32 rounding of a renormalised weight is allowed for."""


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
    refuse_where(
        singleton,
        Reason.SINGLETON_LOGPROB_NOT_ZERO,
        field="rollout_logprobs",
        values=trajectory.rollout_logprobs,
        expected="0: the kept set holds one id, so it was drawn with probability one",
    )


def _check_offsets(trajectory: TrajectoryFields) -> None:
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


def _check_truncation(trajectory: TrajectoryFields, sizes: NDArray[np.int64]) -> None:
    """Checks which tokens list a kept set, and how long each set is, given how the turn was sampled."""
    truncated, largest = trajectory.truncated, np.zeros(len(trajectory), np.int64)
    for turn in trajectory.turns:
        if turn.sampling is not None:
            largest[turn.start : turn.end] = _largest_kept_set(turn.sampling)
    refuse_where(
        truncated & ~trajectory.sampled,
        Reason.TRUNCATED_NOT_SAMPLED,
        field="truncated",
        values=truncated,
        expected="False on a token that was not sampled",
    )
    refuse_where(
        truncated & (largest == 0),
        Reason.TRUNCATED_UNDER_FULL_SAMPLING,
        field="truncated",
        values=truncated,
        expected="False if the sampling parameters cut nothing",
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
        expected="no ids for a token that is not truncated",
    )
    refuse_where(
        sizes > largest,
        Reason.KEPT_SET_TOO_LARGE,
        field="kept",
        values=sizes,
        expected="at most the top-k of the turn (1 if greedy)",
    )


def _largest_kept_set(sampling: SamplingParams) -> int:
    """Returns the most ids that a kept set may list; 0 if the parameters cut nothing."""
    return 1 if sampling.is_greedy else sampling.effective_top_k or 0


def _check_kept_ids(trajectory: TrajectoryFields, sizes: NDArray[np.int64]) -> None:
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
    drawn = trajectory.token_ids.repeat(sizes) == ids
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
