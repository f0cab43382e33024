"""Rules between the section `rollout` and others, for all engines and for dumps. Pure functions, any process."""

from __future__ import annotations

from collections.abc import Mapping

from moerl.algorithms.registry import AlgorithmConfig
from moerl.config.rollouts import EmbeddedRolloutConfig, RolloutConfig
from moerl.config.schema import BufferConfig, RLConfig
from moerl.contract.trajectory import TURN_REWARDS
from moerl.errors import ConfigError
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


def check_buffer(buffer: BufferConfig, rollout: RolloutConfig) -> None:
    """Raises `ConfigError` if sampling is to run ahead in the trainer's own process."""
    if buffer.max_staleness and isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "inside":
        raise ConfigError(
            "buffer.max_staleness: the engine and the trainer take turns in one process, nothing runs ahead",
            seen=f"max_staleness {buffer.max_staleness}, rollout.placement inside",
            expected="an engine of its own process",
            remedy="set rollout.placement=beside or rollout=sglang, or buffer.max_staleness=0",
        )


def check_precision(rollout: RolloutConfig) -> None:
    """Raises `ConfigError` if the engine does not sample in this precision."""
    if rollout.dtype == "float8" and rollout.engine != "embedded":
        raise ConfigError(
            "rollout.dtype: 8 bits are emulated in the embedded engine on a CPU alone",
            seen=f"dtype float8, engine {rollout.engine}",
            expected="float32 or bfloat16",
            remedy="set rollout.dtype=bfloat16, or rollout=embedded",
        )
