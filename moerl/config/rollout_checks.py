"""Rules between the section `rollout` and others, for all engines and for dumps; of a run's servers also against the
model and against nodes: experts are shared evenly, a server is on one node. Pure functions, any process."""

from __future__ import annotations

from collections.abc import Mapping

from moerl.algorithms.registry import AlgorithmConfig
from moerl.config.rollouts import EmbeddedRolloutConfig, RolloutConfig, SGLangRolloutConfig
from moerl.config.schema import BufferConfig, RLConfig
from moerl.contract.trajectory import TURN_REWARDS
from moerl.errors import ConfigError
from moerl.models.description import ModelDescription
from moerl.scorers.registry import ScorerConfig


def check_scores(
    command: str, rollout: RolloutConfig, algorithm: AlgorithmConfig, scorers: Mapping[str, ScorerConfig]
) -> None:
    """Checks that the algorithm finds its scores, and that scorers have work. Raises `ConfigError`."""
    missing = [name for name in algorithm.needs if name not in scorers]
    if missing and rollout.has_engine and command == "train":
        raise ConfigError(
            "algorithm.scores: nothing gives these scores",
            seen=", ".join(missing),
            expected=f"names in scorers ({', '.join(scorers) or 'none is configured'}), or a dump that has them",
            remedy=f"set scorers.{missing[0]}={{kind: model, path: DIR}}; or rollout=dumps rollout.path=PATH",
        )
    if TURN_REWARDS in scorers:
        raise ConfigError(
            f"scorers.{TURN_REWARDS}: rewards of turns have this name",
            seen=", ".join(scorers),
            expected="another name",
            remedy="rename the scorer, here and in algorithm.scores",
        )
    if scorers and not rollout.has_engine:
        raise ConfigError(
            "scorers: a run from dumps scores no tokens",
            seen=", ".join(scorers),
            expected="scorers={}: the dumps hold the scores",
            remedy="write the dumps with these scorers (moerl rollout), and take scorers away here",
        )
    if scorers and rollout.temperature == 0.0:
        raise ConfigError(
            "scorers: greedy samples have no distribution to score in",
            seen="rollout.temperature=0.0",
            expected="> 0",
            remedy="set rollout.temperature=1.0, or take scorers away",
        )

    at_one = [name for name, scorer in scorers.items() if scorer.only_at_one]
    if at_one and rollout.temperature != 1.0:
        raise ConfigError(
            f"scorers.{at_one[0]}: a server scores at a temperature of 1 alone",
            seen=f"rollout.temperature={rollout.temperature}",
            expected="1.0",
            remedy="set rollout.temperature=1.0, or take a scorer of kind: model",
        )


def require_engine(rollout: RolloutConfig, command: str) -> None:
    """Raises `ConfigError` if rollouts come from dumps. command: what an engine is needed for."""
    if not rollout.has_engine:
        raise ConfigError(
            f"rollout: {command} needs an engine",
            seen="rollout=dumps",
            expected="an engine that samples",
            remedy="set rollout=embedded or rollout=sglang; dumps are for moerl train",
        )


def check_dumps(command: str, rollout: RolloutConfig, rl: RLConfig) -> None:
    """Checks that nothing is asked of a run from dumps that only an engine could do. Raises `ConfigError`."""
    if rollout.has_engine:
        return
    if command != "train":
        require_engine(rollout, f"moerl {command}")
    if rl.weigh_prompts != "even" or rl.skip_above is not None or rl.skip_below is not None:
        raise ConfigError(
            "rl.weigh_prompts, rl.skip_above, rl.skip_below: a run from dumps chooses no prompts",
            seen=f"{rl.weigh_prompts}, {rl.skip_above}, {rl.skip_below}",
            expected="even, null, null",
            remedy="set rl.weigh_prompts=even rl.skip_above=null rl.skip_below=null; the dumps hold what was chosen",
        )


def check_engine(rollout: RolloutConfig, buffer: BufferConfig) -> None:
    """Raises `ConfigError` if sampling is to run ahead in the trainer's own process, or in a precision that the engine
    does not have."""
    if buffer.max_staleness and isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "controller":
        raise ConfigError(
            "buffer.max_staleness: the engine and the trainer take turns in one process, nothing runs ahead",
            seen=f"max_staleness {buffer.max_staleness}, rollout.placement controller",
            expected="an engine of its own process",
            remedy="set rollout.placement=process or rollout=sglang, or buffer.max_staleness=0",
        )
    if rollout.dtype == "float8" and rollout.engine != "embedded":
        raise ConfigError(
            "rollout.dtype: 8 bits are emulated in the embedded engine on a CPU alone",
            seen=f"dtype float8, engine {rollout.engine}",
            expected="float32 or bfloat16",
            remedy="set rollout.dtype=bfloat16, or rollout=embedded",
        )


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


def check_nodes_of_servers(rollout: SGLangRolloutConfig, *, ranks: int, gpus_per_node: int, nodes: int | None) -> None:
    """Checks that each server of a run finds its GPUs on one node; in a colocated run they are GPUs of trainer ranks.

    Ranks of the trainer fill nodes one after another.

    Args:
        ranks: of the trainer.
        nodes: of the job; None if not known: servers with GPUs of their own are then only compared with one node.

    Raises:
        ConfigError: a server would be on two nodes.
    """
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
