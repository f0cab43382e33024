"""Names that a reward may have: each becomes a metric beside those of the sum and of the reported reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from moerl.config.load import load_config
from moerl.errors import ConfigError
from moerl.sections import FunctionName
from moerl.tasks.dataset import DatasetTaskConfig


def load(folder: Path, *names: str) -> list[str]:
    (folder / "rows.jsonl").write_text("{}\n")
    keys = [f"task.rewards.{name}.{key}" for name in names for key in ("kind=exact", "column=answer")]
    data = f"task.sets.a.path='{folder}/rows.jsonl'"
    task = load_config(["recipe=tiny", "sft.steps=0", "task=dataset", data, *keys], command="train").task
    assert isinstance(task, DatasetTaskConfig)
    return list(task.rewards)


@pytest.mark.parametrize("name", ["reward", "accuracy"])
def test_a_reward_with_the_name_of_the_sum_or_of_the_reported_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"task\.rewards.*a name of its own: {name} is that of the sum"):
        load(tmp_path, "right", name)


def test_a_reward_whose_name_only_begins_like_these_is_fine(tmp_path: Path) -> None:
    assert load(tmp_path, "rewards", "accuracy2", "Reward") == ["rewards", "accuracy2", "Reward"]


@pytest.mark.parametrize("function", ["odd_rewards", "odd_rewards.behave", ":f", "odd_rewards:", "m:f()"])
def test_a_name_of_a_function_of_another_form_is_refused(function: str):
    with pytest.raises(ValidationError, match="string_pattern_mismatch"):
        TypeAdapter(FunctionName).validate_python(function)
