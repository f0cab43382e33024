"""Refusals shared by all scores. Runs in trainer processes. Shape legend: `moerl/kernels/__init__.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.contract.reasons import Reason
from moerl.errors import ContractError
from moerl.kernels.kept import KeptRows


def check_rows(num_rows: int, **per_row: Tensor) -> None:
    """Raises `ContractError` where a per-row tensor is not [T]."""
    for name, value in per_row.items():
        if value.shape != (num_rows,):
            raise ContractError(
                Reason.ROWS_DIFFER,
                field=name,
                seen=tuple(value.shape),
                expected=f"[{num_rows}], one value per scored row",
                remedy="pass the per-row arrays of the same microbatch",
            )


def check_temperatures(temperatures: Tensor) -> None:
    """Raises `ContractError` where a temperature is not positive (0 is greedy: nothing to differentiate)."""
    wrong = ~(temperatures > 0)
    if bool(wrong.any()):
        raise ContractError(
            Reason.TEMPERATURE_NOT_POSITIVE,
            field="temperatures",
            seen=float(temperatures[wrong][0]),
            expected="> 0 on every scored row",
            remedy="greedy tokens are not trainable: leave them out of the selected rows",
        )


def check_targets(target_ids: Tensor, vocab_size: int) -> None:
    """Raises `ContractError` where a target is no token of the vocabulary."""
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if bool(outside.any()):
        raise ContractError(
            Reason.TARGET_OUTSIDE_VOCABULARY,
            field="target_ids",
            seen=int(target_ids[outside][0]),
            expected=f"an id in [0, {vocab_size})",
            remedy="score only rows whose target is a token; check that engine and trainer share a tokenizer",
        )


def check_listed(rows: Tensor, ids: Tensor, is_target: Tensor, kept: KeptRows, vocab_size: int) -> None:
    """Raises `ContractError` where a listed id is no token or a set does not hold its target exactly once.

    rows, ids, is_target: of the listed entries to look at.
    """
    outside = (ids < 0) | (ids >= vocab_size)
    hits_T = rows.new_zeros(kept.num_rows).index_add_(0, rows, is_target.long())
    missing = hits_T[rows] != 1
    any_outside, any_missing = torch.stack([outside.any(), missing.any()]).tolist()
    if any_outside:
        raise ContractError(
            Reason.KEPT_ID_OUTSIDE_VOCABULARY,
            field="kept",
            seen=f"row {int(rows[outside][0])}: id {int(ids[outside][0])}",
            expected=f"ids in [0, {vocab_size})",
            remedy="engine and trainer must agree on the vocabulary; padding columns are never sampled",
        )
    if any_missing:
        row = int(rows[missing][0])
        raise ContractError(
            Reason.TARGET_NOT_IN_KEPT_SET,
            field="kept",
            seen=f"row {row}: target {int(hits_T[row])} times among {int((rows == row).sum())} listed ids",
            expected="exactly once",
            remedy="row t must carry the kept set of token t + 1: shift targets and kept sets together",
        )
