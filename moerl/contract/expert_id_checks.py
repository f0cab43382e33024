"""Invariants of expert ids: which experts ran.

`check_expert_ids` is called by `moerl.contract.invariants` only, after dtypes and shapes were found right. Sized for
32K tokens of 48 layers x top-8: a few milliseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.demands import refuse_where
from moerl.contract.fields import TrajectoryFields
from moerl.contract.reasons import Reason
from moerl.errors import ContractError

_CHUNK_BYTES = 1 << 19
"""Working set of one step of the distinctness check; stays in the L2 cache."""


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
