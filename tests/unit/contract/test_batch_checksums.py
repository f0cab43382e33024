"""Checksums of contexts and kept sets against their formulas, number by number, and what changes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moerl.contract import batch_checksums
from moerl.contract.batch_checksums import Recorded, context_checksum, kept_checksum
from moerl.contract.routing import EXPERT_PRIME, LAYER_PRIME, MIX_1, MIX_2, POSITION_PRIME
from moerl.contract.trajectory import KeptSets


def mixed(x: int) -> int:
    x %= 2**64
    x = (x ^ (x >> 30)) * MIX_1 % 2**64
    x = (x ^ (x >> 27)) * MIX_2 % 2**64
    return x ^ (x >> 31)


def recorded(seed: int, length: int, num_shared: int = 0) -> Recorded:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, length + 1) * (np.arange(length + 1) > num_shared)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    kept = KeptSets(offsets, rng.integers(0, 90, offsets[-1]).astype(np.int32))
    key = int(rng.integers(0, 2**63)) * 2
    return Recorded(key, rng.integers(0, 90, length), kept, num_shared, key ^ 12345)


SEQUENCES = [recorded(1, 7), recorded(2, 12, num_shared=5), recorded(3, 1), recorded(4, 30, num_shared=29)]


def test_the_checksum_of_contexts_is_its_formula():
    total = 0
    for each in SEQUENCES:
        for t, token in enumerate(each.tokens.tolist()):
            source = each.shared_key if t < each.num_shared else each.key
            salt = mixed(each.key + t * POSITION_PRIME) + source * LAYER_PRIME
            total += mixed(salt + (token + 1) * EXPERT_PRIME)
    assert context_checksum(SEQUENCES) == total % 2**64
    assert context_checksum([]) == 0


@pytest.mark.parametrize("chunk", [1, 4, 1 << 15])
def test_the_checksum_of_kept_sets_is_its_formula(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_checksums, "_CHUNK_IDS", chunk)
    total = 0
    for each in SEQUENCES:
        for t in range(len(each.kept.sizes)):
            for listed in each.kept.ids[each.kept.offsets[t] : each.kept.offsets[t + 1]].tolist():
                total += mixed(mixed(each.key + t * POSITION_PRIME) + (listed + 1) * EXPERT_PRIME)
    assert kept_checksum(SEQUENCES) == total % 2**64
    assert kept_checksum([]) == 0


def test_a_set_that_moves_by_a_row_and_one_of_another_rollout_change_the_sum():
    first, other = SEQUENCES[0], SEQUENCES[1]
    moved = KeptSets(np.concatenate([[0], first.kept.offsets[:-1]]), first.kept.ids[: first.kept.offsets[-2]])
    swapped = [replace(first, kept=other.kept), replace(other, kept=first.kept)]
    sums = [kept_checksum(each) for each in ([first, other], [replace(first, kept=moved), other], swapped)]
    assert len(set(sums)) == 3


def test_another_prompt_and_the_same_prompt_of_another_sequence_change_the_sum():
    first = SEQUENCES[1]
    tokens = first.tokens.copy()
    tokens[:2] = tokens[1::-1]
    changed = [first, replace(first, tokens=tokens), replace(first, shared_key=7), replace(first, num_shared=4)]
    assert len({context_checksum([each]) for each in changed}) == 4
