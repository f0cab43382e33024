"""Plans of scoring a packed microbatch: the inputs of the kernels, made on the host, from facts that the host has.

Runs in trainer processes. Everything is checked here, before the one transfer to the device, so that a pass never waits
for a device to answer. A plan is one rank's: it holds the ids of its vocabulary shard.
Shape legend: `moerl/kernels/__init__.py`; E = listed ids of the selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.reasons import Reason
from moerl.contract.trajectory import KeptSets
from moerl.errors import ContractError
from moerl.kernels import products
from moerl.kernels.device_pairs import Arrays, DevicePairs, device_arrays, device_pairs
from moerl.kernels.full import FullRows
from moerl.kernels.head import Head, HeadInputs
from moerl.kernels.kept import KeptRows, kept_arrays
from moerl.kernels.pairs import Pairs, SortedPairs, plan_pairs
from moerl.kernels.transfer import transfer, under


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a packed microbatch, on the host."""

    target_ids_T: NDArray[np.int64]
    """int64, global ids."""
    temperatures_T: NDArray[np.float32]
    """float32, > 0 on scored rows."""
    kept: KeptSets
    """Kept sets of the rows."""
    truncated_T: NDArray[np.bool_]
    """bool; True on rows that list a kept set."""
    select_T: NDArray[np.bool_] | None = None
    """bool; rows to score (the sampled ones). None: all rows."""
    full_T: NDArray[np.bool_] | None = None
    """bool; rows to score over the full vocabulary as well, all of them or a sample. None: only rows that list nothing
    are."""

    @classmethod
    def open(
        cls,
        target_ids_T: NDArray[np.int64],
        temperatures_T: NDArray[np.float32],
        select_T: NDArray[np.bool_] | None = None,
    ) -> Rows:
        """Returns rows none of which lists a kept set."""
        num_rows = len(target_ids_T)
        return cls(target_ids_T, temperatures_T, KeptSets.empty(num_rows), np.zeros(num_rows, np.bool_), select_T)

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.target_ids_T)


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """The listed ids as a CPU reads them."""

    entries_E: Tensor | None
    """int64; places of the ids of selected rows among the N listed ids. None if all rows are selected."""
    rows_E: Tensor
    """int64; row of each id."""
    is_target_E: Tensor
    """bool; True if the id is its row's target."""
    pairs: Pairs
    """Pairs of this rank."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceListed:
    """The listed ids as a GPU reads them."""

    targets_T: Tensor
    """int64; place of the row's target among the N listed ids, -1 if the row is not scored in a set."""
    pairs: DevicePairs
    """Pairs of this rank."""


@dataclass(frozen=True, slots=True, eq=False)
class ScorePlan:
    """Rows and ids that `moerl.kernels.scores` scores, on the device."""

    bounds: tuple[int, int, int]
    """`VocabShard.bounds` of the shard that the plan is for."""
    kept: KeptRows
    """Kept sets of all rows."""
    temperatures_T: Tensor
    """float32."""
    open_T: Tensor
    """bool; True on rows scored over the full vocabulary alone."""
    listed: Listed | DeviceListed
    """Ids of the kept sets of selected rows."""
    full_rows: FullRows
    """All rows scored over the full vocabulary."""
    with_full: bool
    """True if `Rows.full_T` was given."""


@dataclass(frozen=True, slots=True, eq=False)
class HostPlan:
    """A plan before it is sent to the device: checked and sorted."""

    rows: Rows
    """Rows that are planned."""
    bounds: tuple[int, int, int]
    """`VocabShard.bounds` of the head's shard."""
    device: torch.device
    """Device of the head, to which `send` sends."""
    arrays: Arrays
    """Arrays that are sent, by name."""
    pairs: Pairs | None
    """Pairs of this rank on a CPU; None on a GPU, whose pairs are among the arrays."""

    @classmethod
    def of(cls, rows: Rows, head: Head | HeadInputs) -> HostPlan:
        """Checks the rows and sorts their listed ids. Any thread; touches no device.

        Raises:
            ContractError: shapes disagree, a listed id or target lies outside the vocabulary, a listed set does not
                hold its target exactly once, or a scored row's temperature is not positive.
        """
        per_row = {"temperatures": rows.temperatures_T, "kept": rows.truncated_T}
        per_row |= {} if rows.select_T is None else {"select": rows.select_T}
        per_row |= {} if rows.full_T is None else {"full": rows.full_T}
        _check_rows(rows.num_rows, **per_row)
        _check_sets(rows.kept, rows.truncated_T)
        device, shard = head.weight_VpH.device, head.shard
        kept = kept_arrays(rows.kept, rows.truncated_T)
        open_T = ~rows.truncated_T if rows.select_T is None else ~rows.truncated_T & rows.select_T
        full = _full_arrays(open_T if rows.full_T is None else open_T | rows.full_T, rows, head)
        entries_E = slice(None) if rows.select_T is None else np.flatnonzero(rows.select_T[kept["rows"]])
        rows_E, ids_E = kept["rows"][entries_E], kept["ids"][entries_E]
        is_target_E = ids_E == rows.target_ids_T[rows_E]
        _check_listed(rows_E, ids_E, is_target_E, rows.num_rows, shard.vocab_size)
        _check_temperatures(rows.temperatures_T, rows_E)
        arrays: Arrays = {f"kept.{name}": array for name, array in kept.items()}
        arrays |= {f"full.{name}": array for name, array in full.items()}
        arrays |= {"temperatures": rows.temperatures_T.astype(np.float32), "open": open_T}
        if not products.on_device(device):
            arrays |= {"listed.rows": rows_E, "listed.is_target": is_target_E}
            arrays |= {} if isinstance(entries_E, slice) else {"listed.entries": entries_E}
            pairs = plan_pairs(SortedPairs.of(rows_E, ids_E, shard), rows.num_rows)
            return cls(rows, shard.bounds, device, arrays, pairs)
        # Pairs keep their places among the N listed ids; ids of rows that are not selected belong to no shard.
        ids_N, targets_T = np.full_like(kept["ids"], -1), np.full(rows.num_rows, -1)
        ids_N[entries_E] = ids_E
        targets_T[rows_E[is_target_E]] = np.arange(len(ids_N))[entries_E][is_target_E]
        sorted_pairs = SortedPairs.of(kept["rows"], ids_N, shard)
        listed = device_arrays(sorted_pairs, rows.num_rows, shard.num_columns, head.weight_VpH.shape[1])
        arrays |= {f"pairs.{name}": array for name, array in listed.items()} | {"targets": targets_T}
        return cls(rows, shard.bounds, device, arrays, None)

    def send(self) -> ScorePlan:
        """Sends the plan to the device, in stream order."""
        sent = transfer(self.arrays, self.device)
        if self.pairs is not None:
            listed = Listed(sent.get("listed.entries"), sent["listed.rows"], sent["listed.is_target"], self.pairs)
        else:
            pairs = device_pairs(under(sent, "pairs."), len(self.arrays["kept.ids"]))
            listed = DeviceListed(sent["targets"], pairs)
        return ScorePlan(
            self.bounds,
            KeptRows(**under(sent, "kept.")),
            sent["temperatures"],
            sent["open"],
            listed,
            _full_rows(under(sent, "full."), self.rows, self.device),
            self.rows.full_T is not None,
        )


def plan_rows(rows: Rows, head: Head | HeadInputs) -> ScorePlan:
    """Plans the scoring of rows, and sends the plan to the device of the head. Raises as `HostPlan.of`."""
    return HostPlan.of(rows, head).send()


def plan_full(rows: Rows, chosen_T: NDArray[np.bool_], head: Head | HeadInputs) -> FullRows:
    """Checks some of the rows, and sends them, to be scored over the full vocabulary, to the device of the head.

    Raises:
        ContractError: shapes disagree, a target lies outside the vocabulary, or a temperature is not positive.
    """
    _check_rows(rows.num_rows, temperatures=rows.temperatures_T, chosen=chosen_T)
    device = head.weight_VpH.device
    return _full_rows(transfer(_full_arrays(chosen_T, rows, head), device), rows, device)


def _full_arrays(chosen_T: NDArray[np.bool_], rows: Rows, head: Head | HeadInputs) -> Arrays:
    rows_R = np.flatnonzero(chosen_T)
    _check_targets(rows.target_ids_T, rows_R, head.shard.vocab_size)
    _check_temperatures(rows.temperatures_T, rows_R)
    return {
        "rows_R": rows_R,
        "temperatures_R": rows.temperatures_T[rows_R].astype(np.float32),
        "columns_R": rows.target_ids_T[rows_R] - head.shard.start,
    }


def _full_rows(sent: dict[str, Tensor], rows: Rows, device: torch.device) -> FullRows:
    whole = products.on_device(device) and len(sent["rows_R"]) == rows.num_rows
    return FullRows(**sent, whole=whole)


def _check_rows(num_rows: int, **per_row: NDArray[Any]) -> None:
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


def _check_sets(kept: KeptSets, truncated_T: NDArray[np.bool_]) -> None:
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


def _check_temperatures(temperatures_T: NDArray[np.floating], rows_R: NDArray[np.integer]) -> None:
    """Raises `ContractError` if a temperature of these rows is not positive (0 is greedy: nothing to differentiate)."""
    wrong = rows_R[~(temperatures_T[rows_R] > 0)]
    if len(wrong):
        raise ContractError(
            Reason.TEMPERATURE_NOT_POSITIVE,
            field="temperatures",
            seen=f"{temperatures_T[wrong[0]]} on row {wrong[0]}",
            expected="> 0 on every scored row",
            remedy="greedy tokens are not trainable: leave them out of the selected rows",
        )


def _check_targets(target_ids_T: NDArray[np.integer], rows_R: NDArray[np.integer], vocab_size: int) -> None:
    """Raises `ContractError` if a target of these rows is no token of the vocabulary."""
    outside = rows_R[(target_ids_T[rows_R] < 0) | (target_ids_T[rows_R] >= vocab_size)]
    if len(outside):
        raise ContractError(
            Reason.TARGET_OUTSIDE_VOCABULARY,
            field="target_ids",
            seen=f"{target_ids_T[outside[0]]} on row {outside[0]}",
            expected=f"an id in [0, {vocab_size})",
            remedy="score only rows whose target is a token; check that engine and trainer share a tokenizer",
        )


def _check_listed(
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
