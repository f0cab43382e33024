"""Numbers of problems that a command asks of its task, against those that the task has. Pure; any process."""

from __future__ import annotations

from collections.abc import Iterable

from moerl.config.rollouts import RolloutConfig
from moerl.config.schema import EvaluationConfig, RLConfig, SftConfig
from moerl.contract.ports import Task
from moerl.errors import ConfigError


def check_problems(task: Task, wanted: Iterable[tuple[str, str, int]]) -> None:
    """Raises `ConfigError` if the task has fewer problems than are `wanted` of it; the remedy lists all keys."""
    lacking = [(key, count, split, task.size(split)) for key, split, count in wanted if count > task.size(split)]
    if not lacking:
        return
    key, count, split, size = lacking[0]
    settings = " ".join(f"{key}={size}" for key, _, _, size in lacking)
    raise ConfigError(
        f"{key}: the task has fewer problems",
        seen=count,
        expected=f"at most {size}, the problems of its {split} split",
        remedy="give the task more problems" + (f", or add {settings}" if all(each[3] for each in lacking) else ""),
    )


def wanted_problems(
    command: str, rl: RLConfig, sft: SftConfig, evaluation: EvaluationConfig, rollout: RolloutConfig
) -> list[tuple[str, str, int]]:
    """Returns (configuration key, split, number of problems) that a command asks of the task. Without an engine no
    problem is sampled or measured."""
    wanted = list[tuple[str, str, int]]()
    if command in ("train", "rollout") and rollout.has_engine:
        wanted.append(("rl.prompts_per_step", "train", rl.prompts_per_step))
    if command in ("train", "sft") and sft.steps > 0:
        wanted.append(("sft.num_examples", "train", sft.num_examples))
    if command == "train" and rollout.has_engine:
        wanted.append(("evaluation.dev_problems", "dev", evaluation.dev_problems))
    if command != "rollout" and rollout.has_engine:
        wanted.append(("evaluation.heldout_problems", "heldout", evaluation.heldout_problems))
    return wanted
