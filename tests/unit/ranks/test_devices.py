"""Ranks of the trainer and servers of a run on one machine: each GPU has one of them."""

from __future__ import annotations

import pytest

from moerl.errors import ConfigError, EngineError
from moerl.orchestration.engines import first_devices
from moerl.ranks.start import check_gpus


@pytest.mark.parametrize(("ranks", "servers", "tensor", "gpus"), [(4, 2, 2, 8), (1, 1, 1, 2), (6, 1, 2, 8)])
def test_servers_take_the_last_gpus_and_ranks_the_first(ranks: int, servers: int, tensor: int, gpus: int) -> None:
    check_gpus(ranks, servers * tensor, gpus)
    of_servers = [first + i for first in first_devices(servers, tensor, gpus) for i in range(tensor)]
    assert of_servers == list(range(gpus - servers * tensor, gpus))
    assert not {*range(ranks)} & {*of_servers}


def test_more_ranks_and_servers_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"seen: 5 ranks, 4 GPUs of servers; expected: at most 8 together"):
        check_gpus(5, 4, 8)
    with pytest.raises(EngineError, match="3 servers with 2 GPUs each, 4 GPUs"):
        first_devices(3, 2, 4)


@pytest.mark.parametrize("gpus", [8, None])
def test_colocated_servers_take_the_gpus_of_the_ranks(gpus: int | None) -> None:
    assert first_devices(2, 2, gpus, shared=True) == [0, 2]


def test_more_gpus_of_colocated_servers_than_there_are_are_refused() -> None:
    with pytest.raises(EngineError, match="3 servers with 2 GPUs each, 4 GPUs"):
        first_devices(3, 2, 4, shared=True)


def test_servers_on_cpu_count_cores_from_the_last_one() -> None:
    assert first_devices(2, 1, None) == [0, 1]
