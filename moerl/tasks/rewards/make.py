"""Rewards made from their settings. Runs in the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.errors import ConfigError
from moerl.reading import read_json
from moerl.tasks.rewards import section
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import RewardProcess
from moerl.tasks.rewards.scorer import RewardPart, RewardScorer, WeightedReward

_MAKERS = {
    "math": "moerl.tasks.rewards.builtin:math",
    "exact": "moerl.tasks.rewards.builtin:exact",
    "regex": "moerl.tasks.rewards.builtin:regex",
    "json": "moerl.tasks.rewards.builtin:json_schema",
    "code": "moerl.tasks.rewards.code:code",
}
"""By kind, the maker of the function that is called in a process."""


def make_scorer(rewards: Mapping[str, section.Reward], accuracy: str | None) -> RewardScorer:
    """Makes the scorer of all rewards of a configuration. accuracy: name of the reward that is reported as accuracy;
    None = the first.

    Raises:
        ConfigError: A file that a reward names cannot be read.
    """
    parts = [
        WeightedReward(name, reward.weight, _part(f"task.rewards.{name}", reward)) for name, reward in rewards.items()
    ]
    return RewardScorer(parts, accuracy or parts[0].name)


def check_rewards(rewards: Mapping[str, section.Reward], accuracy: str | None) -> None:
    """Checks the rules between the keys of rewards; reads no files. Raises `ConfigError`."""
    if accuracy is not None and accuracy not in rewards:
        raise ConfigError(
            "task.accuracy: no such reward",
            seen=accuracy,
            expected=", ".join(rewards) or "a name of task.rewards",
            remedy="name one of them, or null for the first",
        )
    if rewards and all(reward.weight == 0.0 for reward in rewards.values()):
        raise ConfigError(
            "task.rewards: nothing is trained on",
            seen="weight 0 everywhere",
            expected="a weight that is not 0",
            remedy=f"set task.rewards.{next(iter(rewards))}.weight=1.0",
        )
    for name, reward in rewards.items():
        if isinstance(reward, section.JsonReward) and (reward.file is None) == (reward.column is None):
            raise ConfigError(
                f"task.rewards.{name}: file and column: one of them must be given",
                seen="neither" if reward.file is None else "both",
                expected="the place of the JSON schema",
                remedy=f"set task.rewards.{name}.column, or file",
            )
        if isinstance(reward, section.JudgeReward) and reward.lowest >= reward.highest:
            raise ConfigError(
                f"task.rewards.{name}.lowest: not below highest",
                seen=f"{reward.lowest:g}, {reward.highest:g}",
                expected="lowest < highest",
                remedy="swap them",
            )


def _part(key: str, reward: section.Reward) -> RewardPart:
    if isinstance(reward, section.JudgeReward):
        # Every command reads the settings of all tasks, and few have a judge.
        from moerl.tasks.rewards.judge import Judge

        return Judge(reward, key)
    settings, many, batch_size = None, False, 1
    if isinstance(reward, section.FunctionReward):
        function, many, batch_size = reward.function, reward.takes == "many", reward.batch_size
    else:
        function, settings = _MAKERS[reward.kind], _settings(key, reward)
    limits = (reward.timeout_seconds, reward.memory_bytes)
    processes = [RewardProcess(function, *limits, f"{key}.function", settings, many) for _ in range(reward.workers)]
    return RewardPool(processes, batch_size)


def _settings(key: str, reward: section.ProcessKeys) -> dict[str, Any]:
    """Returns the settings that only rewards of this kind have, for the function that makes the reward."""
    settings = reward.model_dump(exclude={"kind", *section.ProcessKeys.model_fields})
    if isinstance(reward, section.JsonReward):
        del settings["file"]
        try:
            settings["schema"] = None if reward.file is None else read_json(reward.file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{key}.file: cannot be read",
                seen=error,
                expected="a JSON schema",
                remedy="check the path and the file",
            ) from error
    return settings
