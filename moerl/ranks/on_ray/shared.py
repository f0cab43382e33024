"""The ranks of a run, for servers that share their devices (`rollout.placement=colocated`). Runs in the controller.

A server is on one node. It uses the devices of `rollout.tensor` ranks that are neighbours there, whichever nodes Ray
has found for the ranks. Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence

from moerl.errors import EngineError
from moerl.ranks.on_ray.messages import NodeFacts
from moerl.rollout.sglang.server import ServerOptions

_ranks: list[NodeFacts] = []
"""Ranks of the run of this process, in rank order."""


def note_ranks(ranks: Sequence[NodeFacts]) -> None:
    """Stores the nodes of the ranks of the run of this process, in rank order."""
    _ranks[:] = ranks


def ranks_of_server(options: ServerOptions) -> list[NodeFacts]:
    """Returns the ranks whose devices a server shares.

    Args:
        options: `first_device` counts the devices of the servers before it.

    Raises:
        EngineError: the nodes have no such ranks any more, or Ray shows one of them no GPU, or several.
    """
    groups = groups_on_nodes([rank.node_id for rank in _ranks], options.tensor)
    number = options.first_device // options.tensor
    if number >= len(groups):
        counts = [sum(rank.node_id == node for rank in _ranks) for node in dict.fromkeys(r.node_id for r in _ranks)]
        raise EngineError(
            f"rollout.servers: no node has {options.tensor} ranks left for server {number} to share devices with",
            seen=f"{', '.join(map(str, counts))} ranks on {len(counts)} nodes, room for {len(groups)} servers",
            expected=f"room for server {number}, whose devices are all on one node",
            remedy=f"set rollout.servers={len(groups)} or less" if groups else "choose a smaller rollout.tensor",
        )
    chosen = [_ranks[rank] for rank in groups[number]]
    for rank, facts in zip(groups[number], chosen, strict=True):
        if options.device != "cpu" and (not facts.gpus or "," in facts.gpus):
            raise EngineError(
                f"rollout.placement=colocated: the GPU of rank {rank}, on {facts.node}",
                seen=f"Ray shows it {facts.gpus or 'none'}",
                expected="one GPU",
                remedy="start the nodes of Ray with their GPUs (--num-gpus), or set rollout.placement=disaggregated",
            )
    return chosen


def groups_on_nodes(nodes: Sequence[str], size: int) -> list[list[int]]:
    """Returns the ranks of each server that there is room for, in rank order.

    Args:
        nodes: of each rank.
        size: ranks of one server.
    """
    groups: list[list[int]] = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, of_rank in enumerate(nodes) if of_rank == node]
        groups += [ranks[first : first + size] for first in range(0, len(ranks) - size + 1, size)]
    return groups
