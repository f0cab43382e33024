"""What is checked about a task before a command writes anything."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moerl.config.load import load_config
from moerl.config.schema import RunConfig
from moerl.contract.ports import Task
from moerl.errors import ConfigError
from moerl.tasks.check import check_problems
from moerl.tasks.registry import make_task


def opened(overrides: Sequence[str], command: str) -> tuple[RunConfig, Task]:
    config = load_config(["recipe=tiny", *overrides], command=command)
    return config, make_task(config.task)


def test_a_task_with_enough_problems_is_accepted() -> None:
    check_problems(*opened([], "train"), "train")


@pytest.mark.parametrize(
    ("override", "command"),
    [
        ("algorithm.prompts_per_step=201", "train"),
        ("sft.num_examples=201", "train"),
        ("sft.num_examples=201", "sft"),
        ("evaluation.dev_problems=5000", "train"),
        ("evaluation.heldout_problems=5000", "train"),
        ("evaluation.heldout_problems=5000", "sft"),
    ],
)
def test_a_command_that_asks_for_more_problems_than_there_are_is_refused_by_key(override: str, command: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{key}: "):
        check_problems(*opened([override], command), command)


def test_demonstrations_are_counted_only_where_a_cold_start_needs_them() -> None:
    check_problems(*opened(["sft.steps=0", "sft.num_examples=201"], "train"), "train")
