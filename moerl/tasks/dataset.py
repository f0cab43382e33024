"""`task=dataset`: problems from data sets, with rewards by name. Runs in the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moerl.errors import ConfigError
from moerl.tasks.data.rows_section import RowsSection
from moerl.tasks.data.task import RowsTask
from moerl.tasks.rewards.make import check_rewards, make_scorer
from moerl.tasks.rewards.section import FunctionReward, JudgeReward, Reward, RewardName


class DatasetTaskConfig(RowsSection):
    """Problems from data sets, and rewards by name."""

    name: Literal["dataset"] = Field(description="Task.")
    rewards: dict[RewardName, Reward] = Field(description="Rewards by name; what is trained on is their weighted sum.")
    accuracy: str | None = Field(description="Name of the reward that is reported as accuracy; null = the first.")
    thinking_end: Annotated[str, Field(min_length=1)] | None = Field(
        description="Text that ends thinking, for example </think>: rewards see what follows the last of it, and"
        " nothing of a response without it; null = all of a response."
    )

    @property
    def own_functions(self) -> tuple[str, ...]:
        return tuple(each.function for each in self.rewards.values() if isinstance(each, FunctionReward))

    @property
    def judges(self) -> tuple[str, ...]:
        return tuple(each.url for each in self.rewards.values() if isinstance(each, JudgeReward))

    @property
    def files(self) -> tuple[Path, ...]:
        return super().files + tuple(file for reward in self.rewards.values() for file in reward.files)

    def open(self) -> RowsTask:
        scorer = make_scorer(self.rewards, self.accuracy)
        columns = {
            f"task.rewards.{name}.{key}": found
            for name, reward in self.rewards.items()
            for key, found in reward.columns.items()
        }
        return RowsTask(
            self.data_sets,
            self.cut,
            scorer,
            response_keys=self.response_keys,
            thinking_end=self.thinking_end,
            columns=columns,
        )

    def check(self, *, sft_steps: int) -> None:
        super().check(sft_steps=sft_steps)
        if self.thinking_end is not None and self.chat_options.get("enable_thinking") is False:
            raise ConfigError(
                "task.thinking_end: the prompt ends thinking already, and no response would have a reward",
                seen=f"{self.thinking_end!r} with task.chat_options.enable_thinking=false",
                expected="one of them",
                remedy="set task.thinking_end=null",
            )
        check_rewards(self.rewards, self.accuracy)

    def check_files(self) -> None:
        super().check_files()
        if not self.rewards:
            raise ConfigError(
                "task.rewards: there is none",
                seen="{}",
                expected="one or more, by name",
                remedy="for example task.rewards.answer.kind=math task.rewards.answer.column=answer",
            )
