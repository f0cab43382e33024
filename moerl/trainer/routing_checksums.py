"""Salts of a rank's rows, for the trainer's side of the proof that Keep Routing happened.

The salted checksum of `moerl.contract.routing` is computed from the routing map that is handed to the token dispatcher
(`moerl.kernels.routing`), and compared with the one computed from the trajectories before packing. Runs in every
trainer rank.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.batch import Microbatch
from moerl.contract.routing import POSITION_PRIME
from moerl.contract.shares import context_rows
from moerl.kernels.mixing import mix, signed


def row_keys(batch: Microbatch, context: int, context_rank: int, *, ahead: int = 0) -> Tensor:
    """Returns the salt of every row of a context-parallel rank, from its rollout and token position: int64 [t].

    Args:
        batch: that rank's share. ahead: added to positions.
    """
    keys_t, positions_t = row_origins(batch, context, context_rank)
    places_t = torch.from_numpy(positions_t + ahead)
    return mix(torch.from_numpy(keys_t.view(np.int64)) + places_t * signed(POSITION_PRIME))


def row_origins(batch: Microbatch, context: int, context_rank: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Returns the salt of the rollout and the token position of every row of a context-parallel rank: uint64 [t] and
    int64 [t]."""
    keys_T = np.repeat(batch.rollout_keys, np.diff(batch.cu_seqlens))
    return keys_T[context_rows(batch.cu_seqlens, context, context_rank)], batch.position_ids.astype(np.int64)


def as_signed(checksums: np.ndarray) -> Tensor:
    """Returns uint64 checksums as int64 bit patterns."""
    return torch.from_numpy(checksums.view(np.int64).copy())
