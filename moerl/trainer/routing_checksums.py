"""The trainer's side of the proof that Keep Routing happened.

Computes the salted checksum of `moerl.contract.routing` from the routing map that is handed to the token dispatcher,
and compares it with the one computed from the trajectories before packing. Runs in every trainer rank.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.batch import Microbatch
from moerl.contract.routing import EXPERT_PRIME, LAYER_PRIME, MIX_1, MIX_2, POSITION_PRIME
from moerl.contract.shares import context_rows


def signed(value: int) -> int:
    """A uint64 constant as the int64 with the same bits: torch has no uint64 arithmetic, int64 wraps alike."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 bit patterns."""
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)


def row_keys(batch: Microbatch, context: int, context_rank: int, *, ahead: int = 0) -> Tensor:
    """int64 [t]: salt of every row of a context-parallel rank from its rollout and token position.

    Args:
        batch: that rank's share. ahead: added to positions.
    """
    keys_t, positions_t = row_origins(batch, context, context_rank)
    places_t = torch.from_numpy(positions_t + ahead)
    return mix(torch.from_numpy(keys_t.view(np.int64)) + places_t * signed(POSITION_PRIME))


def row_origins(batch: Microbatch, context: int, context_rank: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """uint64 [t] and int64 [t]: salt of the rollout and token position of every row of a context-parallel rank."""
    keys_T = np.repeat(batch.rollout_keys, np.diff(batch.cu_seqlens))
    return keys_T[context_rows(batch.cu_seqlens, context, context_rank)], batch.position_ids.astype(np.int64)


def map_checksum(routing_map_TE: Tensor, keys_T: Tensor, left_out_T: Tensor, moe_layer: int) -> Tensor:
    """int64 scalar: checksum of one layer's routing map over this rank's rows.

    Args:
        routing_map_TE: bool [T, E], as the dispatcher receives it.
        keys_T: `row_keys` of these rows. left_out_T: bool [T], rows that do not count.
        moe_layer: index among the model's MoE layers, from 0.
    """
    return _terms(routing_map_TE & ~left_out_T[:, None], keys_T, moe_layer)[1].sum()


def row_checksums(routing_map_TE: Tensor, keys_T: Tensor, moe_layer: int) -> Tensor:
    """int64 [T]: the share of every row in `map_checksum`."""
    rows, terms = _terms(routing_map_TE, keys_T, moe_layer)
    return torch.zeros_like(keys_T).index_add_(0, rows, terms)


def _terms(routing_map_TE: Tensor, keys_T: Tensor, moe_layer: int) -> tuple[Tensor, Tensor]:
    """Per routed pair its row, and what it adds to the checksum."""
    rows, experts = routing_map_TE.nonzero(as_tuple=True)
    slots = (experts + (moe_layer * LAYER_PRIME + 1)) * signed(EXPERT_PRIME)
    return rows, mix(keys_T[rows] + slots)


def as_signed(checksums: np.ndarray) -> Tensor:
    """uint64 checksums as int64 bit patterns."""
    return torch.from_numpy(checksums.view(np.int64).copy())
