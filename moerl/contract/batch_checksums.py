"""Salted checksums over what is packed besides routing: the tokens that sequences attend to, and kept sets.

Modulo 2^64, with `mix`, `rollout_key` and primes of `moerl.contract.routing`:

    contexts = sum over samples and their input tokens at positions t of
               mix(mix(key + t * P1) + source * P2 + (token + 1) * P3)
    kept     = sum over samples, their sampled tokens at positions t and the ids that each was drawn from of
               mix(mix(key + t * P1) + (id + 1) * P3)

`key` is the salt of the sample's rollout and `source` that of the sequence that holds the token: its own, or that of
the prompt that samples share. So a sample that goes on from another prompt, a row that is shifted and a set of another
row each change a sum. This module computes them from trajectories (numpy); the trainer computes them from the rows that
attention reads and from the sets that the scoring kernel gets (torch, `moerl.trainer.batch_checksums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moerl.contract.routing import EXPERT_PRIME, LAYER_PRIME, POSITION_PRIME, mix
from moerl.contract.trajectory import KeptSets

_CHUNK_IDS = 1 << 15
"""Kept ids that are mixed at a time; eight bytes each."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One sequence as it was recorded, however it is packed."""

    key: int
    """Salt of the sequence (`moerl.contract.routing.rollout_key`)."""

    tokens: NDArray[np.integer]
    """int [n]; the tokens that the sequence attends to, from position 0 on."""

    kept: KeptSets
    """Kept sets of the tokens by position; no rows if nothing is scored."""

    num_shared: int = 0
    """Number of first tokens that stand in the sequence of salt `shared_key` instead."""

    shared_key: int = 0
    """Salt of the sequence that holds the shared tokens; 0 without any."""


def context_checksum(sequences: Sequence[Recorded]) -> int:
    """Returns the sum over what sequences attend to, the first of the formulas above."""
    keys, positions = _origins(sequences, [len(each.tokens) for each in sequences])
    tokens = np.concatenate([np.zeros(0, np.int64), *(each.tokens for each in sequences)]).astype(np.uint64)
    shared = [np.arange(len(each.tokens)) < each.num_shared for each in sequences]
    of_shared = np.repeat(np.array([each.shared_key for each in sequences], np.uint64), [len(each) for each in shared])
    sources = np.where(np.concatenate([np.zeros(0, np.bool_), *shared]), of_shared, keys)
    salts = mix(keys + positions * np.uint64(POSITION_PRIME)) + sources * np.uint64(LAYER_PRIME)
    return _sum(mix(salts + (tokens + np.uint64(1)) * np.uint64(EXPERT_PRIME)))


def kept_checksum(sequences: Sequence[Recorded]) -> int:
    """Returns the sum over kept sets, the second of the formulas above."""
    kept = KeptSets.joined([each.kept for each in sequences])
    keys, positions = _origins(sequences, [len(each.kept.sizes) for each in sequences])
    salts = mix(keys + positions * np.uint64(POSITION_PRIME))
    firsts = np.searchsorted(kept.offsets, np.arange(0, len(kept.ids), _CHUNK_IDS))
    total = 0
    for start, stop in pairwise(np.unique([0, *firsts, len(salts)]).tolist()):
        ids = kept.ids[kept.offsets[start] : kept.offsets[stop]].astype(np.uint64)
        of_rows = np.repeat(salts[start:stop], kept.sizes[start:stop])
        total += _sum(mix(of_rows + (ids + np.uint64(1)) * np.uint64(EXPERT_PRIME)))
    return total % 2**64


def _origins(sequences: Sequence[Recorded], lengths: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns salt and position of every token of sequences of these lengths."""
    starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
    positions = np.arange(sum(lengths)) - np.repeat(starts, lengths)
    return np.repeat(np.array([each.key for each in sequences], np.uint64), lengths), positions.astype(np.uint64)


def _sum(terms: NDArray[np.uint64]) -> int:
    return int(terms.sum(dtype=np.uint64))
