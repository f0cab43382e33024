"""Bytes between ranks: nothing, little, and ranks that send different lengths."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from gloo import run_ranks

from moerl.trainer.collectives import all_gather_bytes, gather_bytes, share_bytes

MESSAGES = [b"", b"\x00one", b"of the third rank" * 1000]


def exchange(rank: int, world_size: int) -> list[object]:
    group: Any = dist.new_group(backend="gloo")
    found: list[object] = []
    for each in (None, group):
        found += [all_gather_bytes(MESSAGES[rank], each), gather_bytes(MESSAGES[rank], each)]
        found += [share_bytes(MESSAGES[(rank + 2) % world_size], each), share_bytes(b"", each)]
    return found


def test_every_rank_gets_what_it_should() -> None:
    for rank, found in enumerate(run_ranks(3, exchange)):
        assert found == 2 * [MESSAGES, MESSAGES if rank == 0 else [], MESSAGES[2], b""]


def alone(rank: int, world_size: int) -> list[object]:
    return [all_gather_bytes(b"mine"), gather_bytes(b"mine"), share_bytes(b"mine")]


def test_one_rank_talks_to_itself() -> None:
    assert run_ranks(1, alone) == [[[b"mine"], [b"mine"], b"mine"]]
