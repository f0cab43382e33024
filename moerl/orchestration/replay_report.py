"""Why a proof of Keep Routing failed: the first row that differs, found by a second, slow pass.

Runs in every trainer rank. The main rank has the trajectories; the others send it, row by row, checksums of what
reached their dispatchers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.routing import rollout_key, row_checksums
from moerl.errors import ReplayError, UnprovedError
from moerl.orchestration.exchange import broadcast_bytes, gather_words, min_over
from moerl.trainer.replay_rows import TracedRows
from moerl.trainer.trainer import MegatronTrainer

_NOBODY = 2**62


def explain(
    error: UnprovedError, trainer: MegatronTrainer, batches: Sequence[Microbatch], samples: Sequence[TrainSample]
) -> ReplayError:
    """This rank's error with the first differing row, over all ranks; a collective after `trainer.step` raised.

    Args:
        batches: this rank's shares, as given to the step.
        samples: on the main rank, the trajectories of the minibatch; empty elsewhere.
    """
    microbatch = int(min_over(torch.tensor([error.microbatch if error.microbatch >= 0 else _NOBODY])))
    if microbatch == _NOBODY:
        return error
    words = gather_words(_as_words(trainer.trace(batches, microbatch)))
    found = first_difference(words, samples) if trainer.where.is_main else ""
    found = broadcast_bytes(found.encode()).decode()
    return ReplayError(
        error.what,
        seen=f"{error.seen or 'nothing wrong on this rank'}; {found}",
        expected=error.expected,
        remedy=error.remedy,
    )


def _as_words(rows: TracedRows) -> NDArray[np.int64]:
    """int64 [r * l, 4]: rollout key, position, MoE layer, checksum."""
    num_rows, num_layers = rows.checksums_rl.shape
    return np.stack(
        [
            np.repeat(rows.keys.view(np.int64), num_layers),
            np.repeat(rows.positions, num_layers),
            np.tile(rows.moe_layers, num_rows),
            rows.checksums_rl.view(np.int64).reshape(-1),
        ],
        axis=1,
    )


def first_difference(words_R4: NDArray[np.int64], samples: Sequence[TrainSample]) -> str:
    """Which traced row is the first, by trajectory, position and layer, that is not the trajectory's.

    Args:
        words_R4: rollout key, position, MoE layer and checksum of the rows of all ranks.
    """
    for sample in samples:
        trajectory = sample.trajectory
        key = rollout_key(trajectory.lineage.rollout_id)
        traced_R4 = words_R4[words_R4[:, 0] == np.uint64(key).view(np.int64)]
        expected_SL = row_checksums(key, trajectory.expert_ids).view(np.int64)
        wrong_R4 = traced_R4[traced_R4[:, 3] != expected_SL[traced_R4[:, 1], traced_R4[:, 2]]]
        if len(wrong_R4):
            _, position, layer, _ = wrong_R4[np.lexsort((wrong_R4[:, 2], wrong_R4[:, 1]))[0]]
            experts = sorted(trajectory.expert_ids[position, layer].tolist())
            return (
                f"first differing row: rollout {trajectory.lineage.rollout_id}, token {position}, MoE layer {layer},"
                f" which recorded experts {experts}; {len(wrong_R4)} rows of this rollout differ"
            )
    return "a second pass routed every row as recorded: the fault did not repeat"
