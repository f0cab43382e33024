"""Rows of microbatches as tables that travel to the controller, and back. Runs in every trainer rank.

Shape legend: T = rows of a share, R = trained rows, C = columns, B = samples of a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.contract.trainer import ROW_COLUMNS
from moerl.trainer.replay_rows import TracedRows
from moerl.trainer.trainer import RowScores


def local_rows(
    layout: RankCoordinates, batches: Sequence[Microbatch], scores: Sequence[RowScores]
) -> NDArray[np.float32]:
    """Returns this rank's rows of the table, float32 [R, C], columns `ROW_COLUMNS`: over all ranks, every trained token
    once.

    Tensor-parallel ranks hold the same rows; only the first of them returns rows.
    """
    if not layout.is_last_stage or layout.tensor_rank > 0:
        return np.zeros((0, len(ROW_COLUMNS)), np.float32)
    parts = []
    for batch, score in zip(batches, scores, strict=True):
        zeros_T = torch.zeros(batch.num_rows)

        def column(tensor: Tensor | None, otherwise: Tensor = zeros_T) -> NDArray[np.float32]:
            return (otherwise if tensor is None else tensor).float().numpy()

        columns_CT = np.stack(
            [
                column(score.logprobs_T),
                batch.rollout_logprobs,
                column(score.full_logprobs_T),
                column(score.entropy_T),
                column(score.clipped_T),
                column(score.layers_differing_T),
                column(score.weights_T, torch.ones(batch.num_rows)),
                column(score.kl_T),
                batch.sample_index.astype(np.float32),
                (batch.position_ids + 1).astype(np.float32),
            ]
        )
        parts.append(columns_CT[:, batch.loss_mask].T)
    return np.concatenate(parts).astype(np.float32)


def with_clipping(before: Sequence[RowScores], after: Sequence[RowScores]) -> list[RowScores]:
    """Returns the scores from before the first update (same weights as the engine), with clipping, weights and KL of
    the loss of this update."""
    return [
        replace(b, clipped_T=a.clipped_T, weights_T=a.weights_T, kl_T=b.kl_T if a.kl_T is None else a.kl_T)
        for b, a in zip(before, after, strict=True)
    ]


def with_advantages(batch: Microbatch, advantages_B: NDArray[np.float32]) -> Microbatch:
    """Returns the microbatch with these advantages, one for each sample of the minibatch, on its trained rows."""
    advantages_T = np.where(batch.loss_mask, advantages_B[batch.sample_index], np.float32(0.0))
    return replace(batch, advantages=advantages_T.astype(np.float32))


def as_words(rows: TracedRows, rank: int) -> NDArray[np.int64]:
    """Returns traced rows as a table with the columns `moerl.contract.trainer.WORDS`: int64 [r * l, 6]."""
    num_rows, num_layers = rows.checksums_rl.shape
    return np.stack(
        [
            np.repeat(rows.keys.view(np.int64), num_layers),
            np.repeat(rows.positions, num_layers),
            np.tile(rows.moe_layers, num_rows),
            rows.checksums_rl.view(np.int64).reshape(-1),
            np.full(num_rows * num_layers, rank),
            np.repeat(rows.routed_r.astype(np.int64), num_layers),
        ],
        axis=1,
    )
