"""Checks, before any router runs, that the microbatches that a rank has received can be replayed.

Runs in every trainer rank. Guarantees of a trajectory are checked again here: a row that repeats an expert, or names
one that does not exist, would end one rank in a dispatcher and leave the other ranks waiting for that rank.
Shape legend: t routing rows of this rank, l its MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.contract.array_checks import rows_are_distinct
from moerl.contract.batch import Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.contract.trajectory import ModelSpec
from moerl.errors import UnprovedError
from moerl.trainer.replay_rows import routing_slice


def find_unusable_routing(
    batches: Sequence[Microbatch], layers: Sequence[int], spec: ModelSpec, layout: RankCoordinates, *, enforce: bool
) -> UnprovedError | None:
    """Returns the error of a microbatch that cannot be replayed; None if all can.

    Every input row needs expert ids that exist, every captured row distinct ones, every microbatch their checksums, and
    every sequence a key of its own.

    Args:
        batches: this rank's shares. layers: its MoE layers, as indices among those of the model.
        enforce: True if recorded routing is needed; if False, it may be missing, and is only compared with.
    """
    for microbatch, batch in enumerate(batches):
        if enforce and (batch.expert_ids is None or batch.routing_checksums is None):
            return UnprovedError(
                f"microbatch {microbatch} is without recorded routing",
                seen="no expert ids or no checksums of them",
                expected="both, for Keep Routing",
                remedy="pack the batch for replay, or set keep_routing.mode=off",
            )
        if batch.expert_ids is None:
            continue
        problem = (
            _shape_problem(microbatch, batch, layers, spec, layout)
            or _expert_problem(microbatch, batch, layers, spec, layout)
            or _key_problem(microbatch, batch)
        )
        if problem is not None:
            return problem
    return None


def _shape_problem(
    microbatch: int, batch: Microbatch, layers: Sequence[int], spec: ModelSpec, layout: RankCoordinates
) -> UnprovedError | None:
    assert batch.expert_ids is not None
    wanted = (batch.num_rows // layout.dims.tensor, len(layers), spec.experts_per_token)
    if batch.expert_ids.shape != wanted:
        return UnprovedError(
            f"the routing rows of microbatch {microbatch} do not match its input rows",
            seen=batch.expert_ids.shape,
            expected=f"{wanted} (rows, MoE layers, experts per token of rank {layout.rank})",
            remedy="every input row needs its route, prompt included; cut routes at the rows where tokens are cut",
        )
    if batch.routing_checksums is not None and batch.routing_checksums.shape != (len(layers),):
        return UnprovedError(
            f"the routing checksums of microbatch {microbatch} do not match the MoE layers of rank {layout.rank}",
            seen=batch.routing_checksums.shape,
            expected=(len(layers),),
            remedy="cut checksums over ranks as layers are cut",
        )
    return None


def _expert_problem(
    microbatch: int, batch: Microbatch, layers: Sequence[int], spec: ModelSpec, layout: RankCoordinates
) -> UnprovedError | None:
    """Returns the error of experts that the dispatcher cannot send a row to; None if there are none. Rows left to the
    router need no distinct experts, but their ids are read, too, and have to exist."""
    assert batch.expert_ids is not None
    remedy = "something changed the routes after packing; report it as a bug with the layout"
    if batch.expert_ids.max(initial=0) >= spec.num_experts:
        row, layer, slot = np.argwhere(batch.expert_ids >= spec.num_experts)[0].tolist()
        return UnprovedError(
            f"microbatch {microbatch} routes a row to an expert that does not exist",
            seen=f"expert {batch.expert_ids[row, layer, slot]} in {_row_name(batch, row, layout)},"
            f" MoE layer {layers[layer]}",
            expected=f"ids in [0, {spec.num_experts})",
            remedy=remedy,
        )
    rows_r = np.flatnonzero(batch.routed[routing_slice(batch, layout)])
    routed_rlK = batch.expert_ids if len(rows_r) == len(batch.expert_ids) else batch.expert_ids[rows_r]
    if rows_are_distinct(routed_rlK):
        return None
    in_order = np.sort(routed_rlK, axis=2)
    row, layer = np.argwhere((in_order[:, :, 1:] == in_order[:, :, :-1]).any(2))[0].tolist()
    return UnprovedError(
        f"microbatch {microbatch} has a row that repeats an expert",
        seen=f"experts {routed_rlK[row, layer].tolist()} in {_row_name(batch, int(rows_r[row]), layout)},"
        f" MoE layer {layers[layer]}",
        expected=f"{spec.experts_per_token} distinct experts",
        remedy=remedy,
    )


def _row_name(batch: Microbatch, row: int, layout: RankCoordinates) -> str:
    at = routing_slice(batch, layout).start + row
    return f"row {at} ({'padding' if batch.is_pad[at] else f'token {batch.position_ids[at]}'})"


def _key_problem(microbatch: int, batch: Microbatch) -> UnprovedError | None:
    """Returns the error of a key that two sequences have, or None. Rows of one key and position have one salt: their
    routes could change places under the same checksum."""
    keys, counts = np.unique(batch.rollout_keys[batch.rollout_keys != 0], return_counts=True)
    if not (counts > 1).any():
        return None
    return UnprovedError(
        f"microbatch {microbatch} holds two sequences of one rollout",
        seen=f"key {int(keys[counts.argmax()]):#018x} {counts.max()} times",
        expected="a key of its own for each sequence",
        remedy="pack every rollout once",
    )
