"""Bytes between ranks: nothing, little, and ranks that send different lengths."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ranks import Ranks

from moerl.trainer.collectives import all_gather_bytes, gather_bytes, share_bytes

MESSAGES = [b"", b"\x00one of the second rank" * 1000]


def exchange(layout: Any) -> list[object]:
    rank, world_size = layout.rank, layout.dims.world_size
    group: Any = dist.new_group(backend="gloo")
    found: list[object] = []
    for each in (None, group):
        found += [all_gather_bytes(MESSAGES[rank], each), gather_bytes(MESSAGES[rank], each)]
        found += [share_bytes(MESSAGES[(rank + 1) % world_size], each), share_bytes(b"", each)]
    return found


def test_every_rank_gets_what_it_should(two_processes: Ranks) -> None:
    for rank, found in enumerate(two_processes.run(exchange)):
        assert found == 2 * [MESSAGES, MESSAGES if rank == 0 else [], MESSAGES[1], b""]


def alone(layout: Any) -> list[object]:
    return [all_gather_bytes(b"mine"), gather_bytes(b"mine"), share_bytes(b"mine")]


def test_one_rank_talks_to_itself(one_process: Ranks) -> None:
    assert one_process.run(alone) == [[[b"mine"], [b"mine"], b"mine"]]
