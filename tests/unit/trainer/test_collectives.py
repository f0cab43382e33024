"""Bytes between ranks: nothing, little, and ranks that send different lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from moerl.trainer import platform
from moerl.trainer.collectives import all_gather_bytes, device_of, gather_bytes, share_bytes

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


@pytest.mark.parametrize(("backend", "device"), [("nccl", "meta"), ("gloo", "cpu")])
def test_a_group_of_devices_gets_tensors_on_the_device_and_one_of_gloo_gets_them_on_the_host(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "collective_backend", lambda: "nccl")
    monkeypatch.setattr(platform, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert device_of() == torch.device(device)
