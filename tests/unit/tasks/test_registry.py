"""All tasks are found, and each brings its own settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from waiting import run_within

from moerl.config.compose import CONFIGS
from moerl.tasks.calculator import CalculatorTaskConfig
from moerl.tasks.chain_sum import ChainSumTaskConfig
from moerl.tasks.dataset import DatasetTaskConfig
from moerl.tasks.environment import EnvironmentTaskConfig
from moerl.tasks.guess import GuessTaskConfig
from moerl.tasks.gymnasium_text import GymnasiumTaskConfig
from moerl.tasks.jsonl import JsonlTaskConfig
from moerl.tasks.open_env import OpenEnvTaskConfig
from moerl.tasks.reasoning_gym import ReasoningGymTaskConfig
from moerl.tasks.registry import TASK_SECTIONS
from moerl.tasks.self_play import SelfPlayTaskConfig
from moerl.tasks.text_arena import TextArenaTaskConfig

PARITY = '''
from typing import Literal

from pydantic import Field

from moerl.contract.ports import Prompt, Task
from moerl.errors import ConfigError
from moerl.sections import Count
from moerl.tasks.rewards import at_once
from moerl.tasks.section import TaskSection


class ParityTaskConfig(TaskSection):
    """Even or odd."""

    name: Literal["parity"] = Field(description="Task.")
    largest: Count = Field(description="Largest number.")

    def open(self):
        return ParityTask(self.largest)

    def check(self, *, sft_steps):
        if self.largest < 10:
            raise ConfigError("task.largest: too small", seen=self.largest, expected=">= 10", remedy="raise it")


class ParityTask(Task):
    def __init__(self, largest):
        self.largest = largest

    def size(self, split):
        return self.largest

    def prompts(self, split, count):
        return [Prompt(f"parity-{split}-{i}", f"{i}: even or odd? ", {"answer": i % 2}) for i in range(count)]

    def reward(self, prompt, response, finish_reason):
        return at_once({"reward": 1.0, "accuracy": 1.0})
'''

USE = """
import sys
from pathlib import Path
import moerl.tasks
moerl.tasks.__path__.append(sys.argv[1])
from moerl.config.load import load_config
from moerl.config.reference import describe
from moerl.errors import ConfigError
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.listed import refuse
task = ["recipe=tiny", "task=parity", "sft.steps=0"]
config = load_config([*task, "task.largest=300"], command="train", config_dir=Path(sys.argv[2]))
refuse(Facts("train", config))
print(config.task.open().prompts("dev", 2)[1].text, describe("task.largest"))
try:
    load_config([*task, "task.largest=3"], command="train", config_dir=Path(sys.argv[2]))
except ConfigError as error:
    print(error)
"""


def test_the_tasks_are_those_of_the_modules_with_a_section():
    assert [
        CalculatorTaskConfig,
        ChainSumTaskConfig,
        DatasetTaskConfig,
        EnvironmentTaskConfig,
        GuessTaskConfig,
        GymnasiumTaskConfig,
        JsonlTaskConfig,
        OpenEnvTaskConfig,
        ReasoningGymTaskConfig,
        SelfPlayTaskConfig,
        TextArenaTaskConfig,
    ] == TASK_SECTIONS


@pytest.mark.parametrize("path", sorted((CONFIGS / "task").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_values_of_an_option_are_the_keys_of_its_task(path: Path):
    values = yaml.safe_load(path.read_text())
    (section,) = (each for each in TASK_SECTIONS if get_args(each.model_fields["name"].annotation) == (values["name"],))
    assert set(values) == set(section.model_fields)


def test_a_new_task_is_one_module_and_its_values(tmp_path: Path):
    (tmp_path / "parity.py").write_text(PARITY)
    (tmp_path / "configs" / "task").mkdir(parents=True)
    (tmp_path / "configs" / "task" / "parity.yaml").write_text("name: parity\nlargest: 100\n")
    said = run_within([sys.executable, "-c", USE, tmp_path, tmp_path / "configs"], 300)
    assert said.stderr == ""
    first, refused = said.stdout.splitlines()
    assert first == "1: even or odd?  Largest number."
    assert refused.startswith("task.largest: too small; seen: 3; expected: >= 10")
