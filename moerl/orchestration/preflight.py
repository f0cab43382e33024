"""What can be said of a task before torch and Megatron are loaded: problems, demonstrations, and one reward.

Torch-free; runs in the process that a user starts, before any rank.
"""

from __future__ import annotations

from moerl.config.schema import RunConfig
from moerl.contract.ports import DemonstrationTask, Prompt, Task
from moerl.errors import ConfigError, closing


def check_task(config: RunConfig, command: str) -> None:
    """Opens the task of a run, looks at it, and closes it again.

    Raises:
        ConfigError: Its data is unusable or has too few problems for `command`, demonstrations are missing, or the
            reward function cannot be imported or fails on the first response it gets.
    """
    learns = command in ("train", "sft") and config.sft.steps > 0
    with closing(config.task.open()) as task:
        check_problems(config, task, command)
        task.check(num_demonstrations=config.sft.num_examples if learns else 0)


def check_problems(config: RunConfig, task: Task, command: str) -> None:
    """Raises `ConfigError` where the task has fewer problems than `command` asks of it; the remedy lists all keys."""
    lacking = [
        (key, count, split, task.size(split))
        for key, split, count in wanted_problems(config, command)
        if count > task.size(split)
    ]
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


def wanted_problems(config: RunConfig, command: str) -> list[tuple[str, str, int]]:
    """(configuration key, split, number of problems) that a command asks of the task."""
    evaluation, wanted = config.evaluation, []
    if command in ("train", "rollout"):
        wanted.append(("rl.prompts_per_step", "train", config.rl.prompts_per_step))
    if command in ("train", "sft") and config.sft.steps > 0:
        wanted.append(("sft.num_examples", "train", config.sft.num_examples))
    if command == "train":
        wanted.append(("evaluation.dev_problems", "dev", evaluation.dev_problems))
    if command != "rollout":
        wanted.append(("evaluation.heldout_problems", "heldout", evaluation.heldout_problems))
    return wanted


def demonstrations(config: RunConfig, task: Task) -> list[tuple[Prompt, str]]:
    """What a cold start learns from. `ConfigError` where the task does not have that much."""
    if not isinstance(task, DemonstrationTask):
        raise ConfigError(
            "sft.steps: the task has no demonstrations to learn from",
            seen=config.task.name,
            expected="a task that writes worked solutions, or a JSONL with responses (task.response_key)",
            remedy="set sft.steps=0, or give the task demonstrations",
        )
    prompts = task.prompts("train", config.sft.num_examples)
    return list(zip(prompts, task.demonstrations(prompts, config.seed), strict=True))
