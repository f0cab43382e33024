"""Checks shared by all scores, made on the host before anything goes to a device. Runs in trainer processes.

Shape legend: `moerl/kernels/__init__.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.reasons import Reason
from moerl.contract.trajectory import KeptSets
from moerl.errors import ContractError


def check_rows(num_rows: int, **per_row: NDArray[Any]) -> None:
    """Raises `ContractError` if a per-row array is not [T]."""
    for name, value in per_row.items():
        if value.shape != (num_rows,):
            raise ContractError(
                Reason.ROWS_DIFFER,
                field=name,
                seen=tuple(value.shape),
                expected=f"[{num_rows}], one value per scored row",
                remedy="pass the per-row arrays of the same microbatch",
            )


def check_sets(kept: KeptSets, truncated_T: NDArray[np.bool_]) -> None:
    """Raises `ContractError` if flags and listed sets disagree.

    An empty set never means the full vocabulary, and a listed set is never left unused.
    """
    sizes = kept.sizes
    if len(sizes) != len(truncated_T) or int(kept.offsets[-1]) != len(kept.ids):
        raise ContractError(
            Reason.KEPT_SHAPE,
            field="kept",
            seen=f"{len(sizes)} rows, {len(truncated_T)} flags, {len(kept.ids)} ids for {kept.offsets[-1]}",
            expected="one flag per row and offsets that end at the number of ids",
            remedy="pass the kept sets and the truncated flags of the same microbatch",
        )
    wrong = np.flatnonzero((sizes > 0) != truncated_T)
    if len(wrong):
        row = int(wrong[0])
        raise ContractError(
            Reason.TRUNCATED_DISAGREES,
            field="truncated",
            seen=f"row {row}: truncated={bool(truncated_T[row])} with {int(sizes[row])} listed ids",
            expected="truncated on exactly the rows that list ids",
            remedy="pack flags and kept sets from the same rows; an empty set never means all ids",
        )


def check_temperatures(temperatures: NDArray[np.floating]) -> None:
    """Raises `ContractError` if a temperature is not positive (0 is greedy: nothing to differentiate)."""
    wrong = ~(temperatures > 0)
    if wrong.any():
        raise ContractError(
            Reason.TEMPERATURE_NOT_POSITIVE,
            field="temperatures",
            seen=float(temperatures[wrong][0]),
            expected="> 0 on every scored row",
            remedy="greedy tokens are not trainable: leave them out of the selected rows",
        )


def check_targets(target_ids: NDArray[np.integer], vocab_size: int) -> None:
    """Raises `ContractError` if a target is no token of the vocabulary."""
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if outside.any():
        raise ContractError(
            Reason.TARGET_OUTSIDE_VOCABULARY,
            field="target_ids",
            seen=int(target_ids[outside][0]),
            expected=f"an id in [0, {vocab_size})",
            remedy="score only rows whose target is a token; check that engine and trainer share a tokenizer",
        )


def check_listed(
    rows: NDArray[np.integer], ids: NDArray[np.integer], is_target: NDArray[np.bool_], num_rows: int, vocab_size: int
) -> None:
    """Raises `ContractError` if a listed id is no token or a set does not hold its target exactly once.

    rows, ids, is_target: of the listed entries to check.
    """
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise ContractError(
            Reason.KEPT_ID_OUTSIDE_VOCABULARY,
            field="kept",
            seen=f"row {int(rows[outside][0])}: id {int(ids[outside][0])}",
            expected=f"ids in [0, {vocab_size})",
            remedy="engine and trainer must agree on the vocabulary; padding columns are never sampled",
        )
    hits_T = np.bincount(rows[is_target], minlength=num_rows)
    missing = hits_T[rows] != 1
    if missing.any():
        row = int(rows[missing][0])
        raise ContractError(
            Reason.TARGET_NOT_IN_KEPT_SET,
            field="kept",
            seen=f"row {row}: target {int(hits_T[row])} times among {int((rows == row).sum())} listed ids",
            expected="exactly once",
            remedy="row t must carry the kept set of token t + 1: shift targets and kept sets together",
        )
