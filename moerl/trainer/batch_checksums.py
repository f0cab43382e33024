"""The trainer's side of the checksums of `moerl.contract.batch_checksums`: over the tokens that attention reads, and
over the kept sets that tokens are scored in.

Runs in every trainer rank. Ranks add up their rows and compare the sums with those of the trajectories, before the
update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.contract.routing import EXPERT_PRIME, LAYER_PRIME, POSITION_PRIME
from moerl.contract.shares import context_rows
from moerl.errors import UnprovedError
from moerl.kernels.kept import KeptRows
from moerl.kernels.mixing import mix, signed
from moerl.trainer import attention, transfers
from moerl.trainer.replay_rows import routing_slice, row_keys


def context_sum(batch: Microbatch, layout: RankCoordinates) -> Tensor:
    """Returns this rank's part of the context checksum, each row once per sequence that reads it: int64 scalar.

    Args:
        batch: this rank's share.
    """
    mine, size, rank = routing_slice(batch, layout), layout.dims.context, layout.context_rank
    place_T = np.full(batch.num_rows_of_all, -1)
    place_T[context_rows(batch.cu_seqlens, size, rank)[mine]] = np.arange(batch.num_rows)[mine]
    sequences, rows, places = attention.seen_rows(batch, size=size, rank=rank)
    counted = place_T[rows] >= 0
    counted[counted] = ~batch.is_pad[place_T[rows[counted]]]
    rows, positions = rows[counted], torch.from_numpy(places[counted])
    keys_N = torch.from_numpy(batch.rollout_keys.view(np.int64).copy())
    sources_T = keys_N.repeat_interleave(torch.from_numpy(np.diff(batch.cu_seqlens)))
    salts = mix(keys_N[sequences[counted]] + positions * signed(POSITION_PRIME)) + sources_T[rows] * LAYER_PRIME
    tokens = torch.from_numpy(batch.input_ids[place_T[rows]])
    return mix(salts + (tokens + 1) * signed(EXPERT_PRIME)).sum()


def kept_sum(kept: KeptRows, batch: Microbatch, layout: RankCoordinates) -> Tensor:
    """Returns the part of the checksum of kept sets from those that this rank scores in: int64 scalar.

    Args:
        kept: as the scoring kernel gets them, of `batch`, this rank's share.
    """
    # A row's set belongs to the token after it.
    salts_T = transfers.to_device(row_keys(batch, layout.dims.context, layout.context_rank, ahead=1).numpy())
    return mix(salts_T[kept.rows] + (kept.ids + 1) * signed(EXPERT_PRIME)).sum()


def sums(batches: Sequence[Microbatch], kept_sums: Mapping[int, Tensor], layout: RankCoordinates) -> Tensor:
    """Returns this rank's parts of the checksum of contexts and of that of kept sets, by microbatch: int64 [2, M], on
    the device.

    Args:
        batches: this rank's shares. kept_sums: `kept_sum` by microbatch, if tokens were scored in sets.
    """
    contexts_M = np.array([int(context_sum(batch, layout)) for batch in batches], np.int64)
    sums_2M = transfers.to_device(np.stack([contexts_M, np.zeros_like(contexts_M)]))
    # Ranks of one tensor group score the same rows.
    for microbatch, kept in kept_sums.items() if layout.tensor_rank == 0 else ():
        sums_2M[1, microbatch] = kept
    return sums_2M


def first_problem(
    batches: Sequence[Microbatch],
    sums_2M: Tensor,
    kept_sums: Mapping[int, Tensor],
    layout: RankCoordinates,
    *,
    in_sets: bool,
) -> UnprovedError | None:
    """Returns the error of the first sum that is not that of the trajectories, or that is missing; None if there is
    none.

    Args:
        sums_2M: added up over the ranks that share the rows, on the CPU. in_sets: True if this rank scores, and in kept
            sets alone. Other arguments as in `sums`.
    """
    found_2M = sums_2M.numpy().view(np.uint64)
    for microbatch, batch in enumerate(batches):
        proofs = [("the tokens that its sequences attend to", found_2M[0], batch.context_checksum)]
        if in_sets and microbatch not in kept_sums:
            return UnprovedError(
                f"microbatch {microbatch} on rank {layout.rank}: its loss did not say in which kept sets it scored",
                seen="no sets",
                expected="`RowScores.kept`",
                remedy="no update was applied; let the loss hand over the sets of its plan",
            )
        if microbatch in kept_sums:
            proofs.append(("the kept sets that its tokens are scored in", found_2M[1], batch.kept_checksum))
        for what, found_M, expected in proofs:
            if int(found_M[microbatch]) != expected:
                return UnprovedError(
                    f"microbatch {microbatch} on rank {layout.rank}: {what} are not those of the trajectories",
                    seen=f"checksum {int(found_M[microbatch]):#018x}",
                    expected=f"{expected:#018x} (as recorded)",
                    remedy="no update was applied; check that rows, prompts and sets travelled with their trajectory",
                )
    return None
