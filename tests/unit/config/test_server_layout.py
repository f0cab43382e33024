"""Servers against the nodes that a run gets."""

from __future__ import annotations

import pytest

from moerl.config.load import load_plan
from moerl.config.rollout_checks import check_nodes_of_servers
from moerl.config.rollouts import SGLangRolloutConfig
from moerl.errors import ConfigError


@pytest.fixture(scope="module")
def served() -> SGLangRolloutConfig:
    served = load_plan(["recipe=tiny", "rollout=sglang"]).rollout
    assert isinstance(served, SGLangRolloutConfig)
    return served


def rollout(served: SGLangRolloutConfig, servers: int, tensor: int, *, colocated: bool) -> SGLangRolloutConfig:
    placement = "colocated" if colocated else "disaggregated"
    return served.model_copy(update={"servers": servers, "tensor": tensor, "placement": placement})


@pytest.mark.parametrize(
    ("servers", "tensor", "colocated", "ranks", "nodes"),
    [
        (4, 4, True, 16, None),
        # Two servers of three on each node of eight.
        (4, 3, True, 16, 2),
        (1, 4, True, 12, None),
        # The last rank's node has seven GPUs left, the third one all.
        (7, 2, False, 9, 3),
        (1, 8, False, 16, None),
        (1, 8, False, 0, 1),
    ],
)
def test_servers_that_each_find_a_node_are_let_through(
    served: SGLangRolloutConfig, servers: int, tensor: int, colocated: bool, ranks: int, nodes: int | None
) -> None:
    asked = rollout(served, servers, tensor, colocated=colocated)
    check_nodes_of_servers(asked, ranks=ranks, gpus_per_node=8, nodes=nodes)


@pytest.mark.parametrize(
    ("servers", "tensor", "colocated", "ranks", "nodes", "said"),
    [
        (1, 9, True, 16, 2, "rollout.tensor: more ranks of a server than GPUs of a node"),
        (1, 9, False, 16, None, "rollout.tensor: more ranks of a server than GPUs of a node"),
        (5, 3, True, 16, None, "GPUs of ranks, by node: 8, 8; expected: at most 4 servers"),
        (4, 4, True, 14, 2, "GPUs of ranks, by node: 8, 6; expected: at most 3 servers"),
        (2, 4, False, 10, 2, "GPUs that ranks leave free, by node: 0, 6; expected: at most 1 servers"),
    ],
)
def test_a_server_that_would_be_on_two_nodes_is_refused(
    served: SGLangRolloutConfig, servers: int, tensor: int, colocated: bool, ranks: int, nodes: int | None, said: str
) -> None:
    asked = rollout(served, servers, tensor, colocated=colocated)
    with pytest.raises(ConfigError) as caught:
        check_nodes_of_servers(asked, ranks=ranks, gpus_per_node=8, nodes=nodes)
    assert said in str(caught.value)
