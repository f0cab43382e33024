"""Checks of a run's servers against the model and against nodes: experts are shared evenly, a server is on one node.

Pure; any process.
"""

from __future__ import annotations

from moerl.config.rollouts import RolloutConfig, SGLangRolloutConfig
from moerl.errors import ConfigError
from moerl.models.description import ModelDescription


def check_experts_of_server(rollout: RolloutConfig, sizes: ModelDescription | None) -> None:
    """Checks `rollout.expert` against the server's ranks, and against the model if its sizes are known.

    Raises:
        ConfigError: experts, or the parts of one, cannot be shared evenly.
    """
    if not isinstance(rollout, SGLangRolloutConfig) or rollout.expert == 1:
        return
    if rollout.tensor % rollout.expert:
        raise ConfigError(
            "rollout.expert: no divisor of the ranks of a server",
            seen=f"rollout.expert = {rollout.expert}, rollout.tensor = {rollout.tensor}",
            expected=f"a divisor of {rollout.tensor}",
            remedy=f"set rollout.expert={rollout.tensor}, or another divisor",
        )
    if sizes is None:
        return
    if sizes.num_experts % rollout.expert:
        raise ConfigError(
            "rollout.expert: does not divide the experts of the model",
            seen=f"rollout.expert = {rollout.expert}, {sizes.num_experts} experts",
            expected=f"a divisor of {sizes.num_experts}, so that each rank has as many",
            remedy="choose a smaller rollout.expert",
        )
    parts = rollout.tensor // rollout.expert
    if sizes.moe_intermediate_size % parts:
        raise ConfigError(
            "rollout.expert: an expert cannot be cut evenly over the ranks that share it",
            seen=f"{parts} ranks (rollout.tensor / rollout.expert), expert size {sizes.moe_intermediate_size}",
            expected=f"a divisor of {sizes.moe_intermediate_size}",
            remedy=f"set rollout.expert={rollout.tensor}, if the model's experts can be shared so",
        )


def check_nodes_of_servers(rollout: RolloutConfig, *, ranks: int, gpus_per_node: int, nodes: int | None) -> None:
    """Checks that each server of a run finds its GPUs on one node; in a colocated run they are GPUs of trainer ranks.

    Ranks of the trainer fill nodes one after another.

    Args:
        ranks: of the trainer.
        nodes: of the job; None if not known: servers with GPUs of their own are then only compared with one node.

    Raises:
        ConfigError: a server would be on two nodes.
    """
    if not isinstance(rollout, SGLangRolloutConfig):
        return
    if rollout.tensor > gpus_per_node:
        raise ConfigError(
            "rollout.tensor: more ranks of a server than GPUs of a node; they are all on one",
            seen=f"rollout.tensor = {rollout.tensor}, {gpus_per_node} GPUs per node",
            expected=f"at most {gpus_per_node}",
            remedy=f"set rollout.tensor={gpus_per_node} or less",
        )
    full, rest = divmod(ranks, gpus_per_node)
    if rollout.is_colocated:
        free = [gpus_per_node] * full + [rest] * bool(rest)
    elif nodes is not None:
        used = [gpus_per_node] * full + [rest]
        free = [gpus_per_node - each for each in (used + [0] * nodes)[:nodes]]
    else:
        return
    room = sum(each // rollout.tensor for each in free)
    if rollout.servers > room:
        whose = "of ranks" if rollout.is_colocated else "that ranks leave free"
        raise ConfigError(
            "rollout.servers: a server would be on two nodes",
            seen=f"{rollout.servers} servers of {rollout.tensor}; GPUs {whose}, by node: {', '.join(map(str, free))}",
            expected=f"at most {room} servers, each on one node",
            remedy="choose a rollout.tensor that divides the GPUs of a node, or a smaller rollout.servers",
        )
