"""Ranks of the trainer and servers of a run: each GPU has one of them, or a server shares those of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moerl.errors import ConfigError, EngineError
from moerl.ranks.on_ray.messages import NodeFacts, Versions
from moerl.ranks.on_ray.shared import groups_on_nodes, note_ranks, ranks_of_server
from moerl.ranks.start import check_gpus
from moerl.rollout.sglang.kind import first_devices
from moerl.rollout.sglang.server import ServerOptions


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


@pytest.mark.parametrize(
    ("ranks", "size", "groups"),
    [
        ({"a": 4, "b": 4}, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # The third rank of a node has no neighbour there.
        ({"a": 3, "b": 5}, 2, [[0, 1], [3, 4], [5, 6]]),
        ({"a": 1, "b": 1}, 2, []),
    ],
)
def test_a_server_shares_the_devices_of_ranks_of_one_node(
    ranks: dict[str, int], size: int, groups: list[list[int]]
) -> None:
    assert groups_on_nodes([node for node, count in ranks.items() for _ in range(count)], size) == groups


VERSIONS = Versions("3.12", "2.60", "1", "2.13")


@pytest.fixture
def five_ranks() -> Iterator[None]:
    """Two on one node, three on another; the last one has no GPU."""
    nodes, gpus = ["a", "a", "b", "b", "b"], ["4", "5", "GPU-x", "1", ""]
    each = zip(nodes, gpus, strict=True)
    note_ranks([NodeFacts(node, f"10.0.0.{ord(node)}", node, VERSIONS, True, gpu) for node, gpu in each])
    yield
    note_ranks([])


def of(number: int, tensor: int, device: str = "cuda") -> ServerOptions:
    return ServerOptions(Path("model"), Path("env"), device, tensor=tensor, first_device=number * tensor)


@pytest.mark.usefixtures("five_ranks")
def test_a_server_gets_the_node_and_the_gpus_of_its_ranks() -> None:
    found = [[(rank.node_id, rank.gpus) for rank in ranks_of_server(of(number, 2))] for number in (0, 1)]
    assert found == [[("a", "4"), ("a", "5")], [("b", "GPU-x"), ("b", "1")]]


@pytest.mark.usefixtures("five_ranks")
def test_a_server_without_room_on_a_node_or_without_a_gpu_is_refused_with_what_to_set() -> None:
    with pytest.raises(
        EngineError, match=r"2, 3 ranks on 2 nodes, room for 2 .*remedy: set rollout\.servers=2 or less"
    ):
        ranks_of_server(of(2, 2))
    with pytest.raises(EngineError, match=r"remedy: choose a smaller rollout\.tensor"):
        ranks_of_server(of(0, 4))
    with pytest.raises(EngineError, match=r"the GPU of rank 4.*seen: Ray shows it none"):
        ranks_of_server(of(4, 1))
    assert [rank.node_id for rank in ranks_of_server(of(4, 1, "cpu"))] == ["b"]
