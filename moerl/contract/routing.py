"""Salted checksums over routing: independent evidence that Keep Routing enforced what was recorded.

The checksum of MoE layer l over a set of rows is, modulo 2^64,

    sum over rows r and their experts e of  mix(mix(rollout_key[r] + position[r] * P1) + (l * P2 + e + 1) * P3)

with `mix` the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014). It does not depend on the order of rows or
of experts within a row, and any shift of a row or a layer, or a swap between rollouts, changes it. This module
computes it from trajectories (numpy); the trainer computes it from the routing map handed to the dispatcher (torch,
`moerl.trainer.replay_rows`). The two share only these constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITION_PRIME = 0x9E3779B97F4A7C15
LAYER_PRIME = 0x000000000001000F
EXPERT_PRIME = 0xC2B2AE3D27D4EB4F
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

_CHUNK_VALUES = 1 << 15
"""Expert ids that are mixed at a time; eight bytes each."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the splitmix64 finaliser, elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def rollout_key(rollout_id: str) -> int:
    """Returns the 64-bit salt of a rollout id (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(rollout_id.encode(), digest_size=8).digest(), "little")


def shared_key(key: int) -> int:
    """Returns the 64-bit salt of the rows that others share with the rollout of salt `key`: those rows are a sequence
    of their own."""
    return int(mix(np.array([key], np.uint64))[0])


def summed_checksums(
    keys: Sequence[int], firsts: Sequence[int], expert_ids: Sequence[NDArray[Any]], routed: Sequence[NDArray[np.bool_]]
) -> NDArray[np.uint64]:
    """Returns the checksum per MoE layer of sequences, at least one, or of parts of their rows: uint64 [L].

    Args:
        keys: `rollout_key` of each.
        firsts: token position of the first row of each.
        expert_ids: [rows, L, K] of each.
        routed: bool [rows] of each; rows that count.
    """
    lengths = [len(each) for each in expert_ids]
    starts = np.cumsum([0, *lengths[:-1]])
    counted = np.concatenate(routed).nonzero()[0]
    positions = (np.arange(sum(lengths)) - np.repeat(starts - firsts, lengths))[counted]
    salts = _salts(np.repeat(np.array(keys, np.uint64), lengths)[counted], positions)
    # One sequence of which every row counts is not copied.
    experts = np.concatenate(expert_ids) if len(expert_ids) > 1 else expert_ids[0]
    if len(counted) < len(experts):
        experts = experts[counted]
    total = np.zeros(experts.shape[1], np.uint64)
    for _, rows in _row_sums(salts, experts):
        total += rows.sum(axis=0, dtype=np.uint64)
    return total


def row_checksums(key: int, expert_ids: NDArray[np.uint8] | NDArray[np.uint16]) -> NDArray[np.uint64]:
    """Returns uint64 [rows, L]: the share of every row in `summed_checksums`, of one trajectory."""
    num_rows, num_layers, _ = expert_ids.shape
    out = np.empty((num_rows, num_layers), np.uint64)
    for rows, sums in _row_sums(_salts(np.uint64(key), np.arange(num_rows)), expert_ids):
        out[rows] = sums
    return out


def _salts(keys: NDArray[np.uint64] | np.uint64, positions: NDArray[np.integer]) -> NDArray[np.uint64]:
    return mix(keys + positions.astype(np.uint64) * np.uint64(POSITION_PRIME))


def _row_sums(salts: NDArray[np.uint64], expert_ids: NDArray[Any]) -> Iterator[tuple[slice, NDArray[np.uint64]]]:
    """Yields checksums of rows and layers, uint64 [rows, L], a cache-full of rows at a time."""
    _, num_layers, top_k = expert_ids.shape
    layers = np.arange(num_layers, dtype=np.uint64) * np.uint64(LAYER_PRIME) + np.uint64(1)
    step = max(1, _CHUNK_VALUES // (num_layers * top_k))
    for start in range(0, len(salts), step):
        rows = slice(start, start + step)
        slots = (layers[None, :, None] + expert_ids[rows]) * np.uint64(EXPERT_PRIME)
        yield rows, mix(salts[rows, None, None] + slots).sum(axis=2, dtype=np.uint64)
