"""The part of a run's configuration that its trainer ranks read, and the CPU threads of the processes of a run.
Torch-free; any process.

Processes of one machine that work at the same time share `num_threads`; those that take turns have all of them. An
embedded engine in its own process works while the trainer does, but not during the cold start.
"""

from __future__ import annotations

from pathlib import Path

from moerl.algorithms.registry import AlgorithmConfig
from moerl.config.rollouts import EmbeddedRolloutConfig, RolloutConfig, SGLangRolloutConfig
from moerl.config.schema import (
    BufferConfig,
    CheckpointConfig,
    KeepRoutingConfig,
    KeepSamplingMaskConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RLConfig,
    RunConfig,
    SftConfig,
    WeightsConfig,
)
from moerl.config.training import TrainerConfig
from moerl.contract.trainer import Stage
from moerl.sections import Section


class RankConfig(Section):
    """Sections of a `RunConfig` that ranks read, by the same names. Ranks in other processes get them as JSON."""

    seed: int
    """Seed of a model that starts from nothing."""
    run_dir: Path
    """Directory of the run: checkpoints, profiles, logs, weights on disk."""
    num_threads: int
    """CPU threads of the whole run."""
    model: ModelConfig
    """Precision."""
    parallel: ParallelConfig
    """Layout of the ranks."""
    trainer: TrainerConfig
    """Settings of passes and of the optimizer state."""
    rl: RLConfig
    """Steps of the stage, and weight of the load-balancing loss."""
    optimizer: OptimizerConfig
    """Optimizer of the reinforcement learning."""
    algorithm: AlgorithmConfig
    """Loss."""
    buffer: BufferConfig
    """Decides whether groups are sampled while ranks train."""
    rollout: RolloutConfig
    """Engine that gets the weights."""
    keep_routing: KeepRoutingConfig
    """Experts used in training."""
    keep_sampling_mask: KeepSamplingMaskConfig
    """Sets in which tokens are scored."""
    weights: WeightsConfig
    """Way of the weights to the engine."""
    sft: SftConfig
    """Steps and optimizer of the cold start."""
    checkpoint: CheckpointConfig
    """Number of checkpoints to keep."""
    launch: LaunchConfig
    """Placement of the ranks."""

    @classmethod
    def of(cls, config: RunConfig) -> RankConfig:
        """Returns the sections of a run's configuration."""
        return cls(**{name: getattr(config, name) for name in cls.model_fields})


def engine_threads(config: RankConfig) -> int:
    """Returns the threads of the embedded engine: half of the run's, at least 1, if it has its own process on
    the trainer's machine; else all, in turns with the trainer or on a Ray node of its own."""
    return max(1, config.num_threads // 2) if _engine_has_process(config) else config.num_threads


def rank_threads(config: RankConfig, stage: Stage) -> int:
    """Returns the threads of each trainer rank in a stage, at least 1: an equal part of what the engine leaves."""
    left = config.num_threads
    if stage == "rl" and _engine_has_process(config):
        left -= engine_threads(config)
    return max(1, left // config.parallel.world_size)


def cluster_cpus(config: RankConfig) -> int:
    """Returns the CPUs that the actors of a run ask of a Ray cluster without GPUs: those of ranks, and those of the
    engine, or of its servers."""
    rollout, ranks = config.rollout, rank_threads(config, "sft") * config.parallel.world_size
    if isinstance(rollout, SGLangRolloutConfig):
        return ranks + rollout.own_devices
    if isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "process":
        return ranks + engine_threads(config)
    return ranks


def _engine_has_process(config: RankConfig) -> bool:
    rollout = config.rollout
    has_process = isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "process"
    return has_process and config.launch.on != "ray"
