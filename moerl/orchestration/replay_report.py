"""Report of a failed proof of Keep Routing: the first row that differs, found by a second, slow pass.

Runs in the controller, which has the trajectories; the ranks send it, row by row, checksums of the expert ids that
reached their dispatchers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moerl.contract.batch import TrainSample
from moerl.contract.routing import rollout_key, row_checksums
from moerl.contract.trainer import WORDS, Trainer
from moerl.contract.trajectory import Trajectory
from moerl.errors import ReplayError, UnprovedError

KEY, POSITION, LAYER, CHECKSUM, RANK, ROUTED = range(len(WORDS))


@contextlib.contextmanager
def explained(trainer: Trainer, samples: Sequence[TrainSample]) -> Iterator[None]:
    """Surrounds passes of a trainer over one minibatch: if a proof fails, the error names the first row that differs.

    Args:
        samples: the trajectories of the minibatch.

    Raises:
        ReplayError: in place of `UnprovedError`.
    """
    try:
        yield
    except UnprovedError as error:
        if error.microbatch < 0:
            raise
        traced = trainer.trace(error.microbatch)
        found = first_difference(traced.dispatched, samples, traced.recorded)
        raise ReplayError(
            error.what,
            seen=f"{error.seen or 'nothing wrong on this rank'}; microbatch {error.microbatch}, {found}",
            expected=error.expected,
            remedy=error.remedy,
        ) from error


def first_difference(
    traced_R6: NDArray[np.int64], samples: Sequence[TrainSample], recorded_R6: NDArray[np.int64] | None = None
) -> str:
    """Describes the first traced row, by trajectory, position and layer, that differs from the recorded one.

    Args:
        traced_R6: table of `WORDS` of the rows that the ranks dispatched.
        recorded_R6: such a table of recorded rows, if the trainer's own routing is kept; None if the trajectories' is.
    """
    for sample in samples:
        trajectory = sample.trajectory
        key = rollout_key(trajectory.lineage.rollout_id)
        mine_R6 = traced_R6[traced_R6[:, KEY] == np.uint64(key).view(np.int64)]
        if recorded_R6 is None:
            # Rows that were never captured may be routed by the router.
            mine_R6 = mine_R6[trajectory.routed[mine_R6[:, POSITION]]]
            expected_SL = row_checksums(key, trajectory.expert_ids).view(np.int64)
            expected_R = expected_SL[mine_R6[:, POSITION], mine_R6[:, LAYER]]
        else:
            # Checksum of the recorded row of the same rollout, position and layer; 0 if there is none.
            found = {tuple(row[:CHECKSUM]): row[CHECKSUM] for row in recorded_R6.tolist()}
            expected_R = np.array([found.get(tuple(row[:CHECKSUM]), 0) for row in mine_R6.tolist()], np.int64)
        wrong_R6 = mine_R6[(mine_R6[:, CHECKSUM] != expected_R) | (mine_R6[:, ROUTED] == 0)]
        if len(wrong_R6):
            return _difference(trajectory, wrong_R6, own=recorded_R6 is not None)
    return "a second pass routed every row as recorded: the fault did not repeat"


def _difference(trajectory: Trajectory, wrong_R6: NDArray[np.int64], *, own: bool) -> str:
    """Describes the first of the differing rows of a trajectory. own: they should be those of the trainer's own first
    forward pass."""
    first = wrong_R6[np.lexsort((wrong_R6[:, LAYER], wrong_R6[:, POSITION]))[0]]
    position, layer = first[POSITION], first[LAYER]
    experts = f"recorded experts {sorted(trajectory.expert_ids[position, layer].tolist())}"
    fate = "" if first[ROUTED] else " captured, but marked afterwards as left to the router;"
    return (
        f"first differing row: rollout {trajectory.lineage.rollout_id}, token {position}, MoE layer {layer} of"
        f" 0..{trajectory.expert_ids.shape[1] - 1}, rank {first[RANK]},{fate}"
        f" {'recorded in the first forward pass' if own else experts};"
        f" {len(np.unique(wrong_R6[:, POSITION]))} rows of this rollout differ"
    )
