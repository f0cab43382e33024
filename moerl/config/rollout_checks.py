"""Rules between the section `rollout` and others, for all engines and for dumps. Pure functions, any process."""

from __future__ import annotations

from moerl.config.rollouts import DumpsRolloutConfig, EmbeddedRolloutConfig
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError


def check_rollout(config: RunConfig) -> None:
    """Raises `ConfigError` at the first rule that is broken."""
    _check_buffer(config)
    _check_precision(config)
    _check_dumps(config)
    if config.algorithm.needs and config.has_engine and config.command == "train":
        raise ConfigError(
            "algorithm.scores: no engine scores tokens",
            seen=f"{', '.join(config.algorithm.needs)} with rollout={config.rollout.engine}",
            expected="rollouts that have these scores",
            remedy="set rollout=dumps rollout.path=PATH, a dump with these scores; or algorithm.scores=[]",
        )


def require_engine(config: RunConfig, command: str) -> None:
    """Raises `ConfigError` if rollouts come from dumps. command: what an engine is needed for."""
    if not config.has_engine:
        raise ConfigError(
            f"rollout: {command} needs an engine",
            seen="rollout=dumps",
            expected="an engine that samples",
            remedy="set rollout=embedded or rollout=sglang; dumps are for moerl train",
        )


def _check_dumps(config: RunConfig) -> None:
    """Checks that nothing is asked of a run from dumps that only an engine could do."""
    if not isinstance(config.rollout, DumpsRolloutConfig):
        return
    if config.command != "train":
        require_engine(config, f"moerl {config.command}")
    rl = config.rl
    if rl.weigh_prompts != "even" or rl.skip_above is not None or rl.skip_below is not None:
        raise ConfigError(
            "rl.weigh_prompts, rl.skip_above, rl.skip_below: a run from dumps chooses no prompts",
            seen=f"{rl.weigh_prompts}, {rl.skip_above}, {rl.skip_below}",
            expected="even, null, null",
            remedy="set rl.weigh_prompts=even rl.skip_above=null rl.skip_below=null; the dumps hold what was chosen",
        )


def _check_buffer(config: RunConfig) -> None:
    config.queue_limits()
    rollout = config.rollout
    if config.buffer.max_staleness and isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "inside":
        raise ConfigError(
            "buffer.max_staleness: the engine and the trainer take turns in one process, nothing runs ahead",
            seen=f"max_staleness {config.buffer.max_staleness}, rollout.placement inside",
            expected="an engine of its own process",
            remedy="set rollout.placement=beside or rollout=sglang, or buffer.max_staleness=0",
        )


def _check_precision(config: RunConfig) -> None:
    if config.rollout.dtype == "float8" and config.rollout.engine != "embedded":
        raise ConfigError(
            "rollout.dtype: 8 bits are emulated in the embedded engine on a CPU alone",
            seen=f"dtype float8, engine {config.rollout.engine}",
            expected="float32 or bfloat16",
            remedy="set rollout.dtype=bfloat16, or rollout=embedded",
        )
