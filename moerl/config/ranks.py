"""The part of a run's configuration that its trainer ranks read. Torch-free; the controller and every rank."""

from __future__ import annotations

from pathlib import Path

from moerl.algorithms.registry import AlgorithmConfig
from moerl.config.rollouts import RolloutConfig
from moerl.config.schema import (
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
