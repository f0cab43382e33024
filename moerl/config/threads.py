"""CPU threads of the processes of a run. Pure; any process.

Processes of one machine that work at the same time share `num_threads`; those that take turns have all of them. An
embedded engine in its own process works while the trainer does, but not during the cold start.
"""

from __future__ import annotations

from moerl.config.ranks import RankConfig
from moerl.config.rollouts import EmbeddedRolloutConfig, SGLangRolloutConfig
from moerl.contract.trainer import Stage


def engine_threads(config: RankConfig) -> int:
    """Returns the threads of the embedded engine: half of the run's, at least 1, if it has its own process on
    the trainer's machine; else all, in turns with the trainer or on a Ray node of its own."""
    return max(1, config.num_threads // 2) if _engine_is_beside(config) else config.num_threads


def rank_threads(config: RankConfig, stage: Stage) -> int:
    """Returns the threads of each trainer rank in a stage, at least 1: an equal part of what the engine leaves."""
    left = config.num_threads
    if stage == "rl" and _engine_is_beside(config):
        left -= engine_threads(config)
    return max(1, left // config.parallel.world_size)


def cluster_cpus(config: RankConfig) -> int:
    """Returns the CPUs that the actors of a run ask of a Ray cluster without GPUs: those of ranks, and those of the
    engine, or of its servers."""
    rollout, ranks = config.rollout, rank_threads(config, "sft") * config.parallel.world_size
    if isinstance(rollout, SGLangRolloutConfig):
        return ranks + rollout.own_devices
    if isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "beside":
        return ranks + engine_threads(config)
    return ranks


def _engine_is_beside(config: RankConfig) -> bool:
    rollout = config.rollout
    is_beside = isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "beside"
    return is_beside and config.launch.on != "ray"
