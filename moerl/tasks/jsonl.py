"""`task=jsonl`: one JSON-lines file and one reward function, the short way. Runs in the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moerl.errors import ConfigError
from moerl.sections import FilePath, FunctionName, Part, Positive
from moerl.tasks.data.section import DataSet
from moerl.tasks.data.splits import Cut
from moerl.tasks.data.task import RowsTask
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import RewardProcess
from moerl.tasks.rewards.scorer import RewardScorer, WeightedReward
from moerl.tasks.section import TaskSection


class JsonlTaskConfig(TaskSection):
    """Prompts from a JSONL file and a reward function of your own."""

    may_change: ClassVar = frozenset({"reward_workers", "reward_timeout_seconds", "reward_memory_bytes"})
    plan_values: ClassVar = {"path": "unnamed.jsonl", "reward": "unnamed:unnamed"}

    name: Literal["jsonl"] = Field(description="Task.")
    path: FilePath = Field(description="JSONL file, one object per problem.")
    reward: FunctionName = Field(description='Reward function, as "package.module:function".')
    prompt_key: Annotated[str, Field(min_length=1)] = Field(
        description="Key of the prompt in a row: a text that the model continues, or messages for the chat template."
    )
    response_key: Annotated[str, Field(min_length=1)] | None = Field(
        description="Key of a demonstration in a row; null = the file has none."
    )
    heldout_fraction: Part = Field(description="Share of rows kept for the final numbers.")
    dev_fraction: Part = Field(description="Share of rows kept for evaluation while training.")
    reward_workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        description="Most processes of the reward function side by side; sampling waits for none of them."
    )
    reward_timeout_seconds: Positive = Field(description="Longest time one reward may take.")
    reward_memory_bytes: Annotated[int, Field(ge=2**27)] = Field(
        description="Most memory of one process of the reward function, and of each that it starts; at least 128 MiB."
    )

    @property
    def own_functions(self) -> tuple[str, ...]:
        return (self.reward,)

    @property
    def cut(self) -> Cut:
        """Way in which the file is split."""
        return Cut(self.dev_fraction, self.heldout_fraction, None, "raw")

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def open(self) -> RowsTask:
        data = _JsonlSet(name="", path=self.path, prompt=self.prompt_key, response=self.response_key)
        limits = (self.reward_timeout_seconds, self.reward_memory_bytes)
        pool = RewardPool([RewardProcess(self.reward, *limits) for _ in range(self.reward_workers)])
        return RowsTask(
            [data],
            self.cut,
            RewardScorer([WeightedReward("", 1.0, pool)]),
            response_keys=f"task.response_key={self.response_key!r}",
        )

    def check(self, *, sft_steps: int) -> None:
        self.cut.check()
        if sft_steps > 0 and self.response_key is None:
            raise ConfigError(
                "sft.steps: a cold start needs demonstrations and the task has none",
                seen=f"sft.steps = {sft_steps}, task.response_key = null",
                expected="sft.steps = 0, or a response_key",
                remedy="set sft.steps=0, or name the key that holds demonstrations with task.response_key",
            )

    def check_files(self) -> None:
        if not self.path.is_file():
            raise ConfigError(
                "task.path: a directory" if self.path.is_dir() else "task.path: no such file",
                seen=self.path,
                expected="a JSONL file",
                remedy="give the path of your JSONL file",
            )


class _JsonlSet(DataSet):
    """A set whose keys have the names of this task."""

    def of(self, key: str) -> str:
        return f"task.{key}_key" if key in ("prompt", "response") else f"task.{key}"
