"""`task=dataset`: problems from data sets, with rewards by name. Runs in the controller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from moerl.errors import ConfigError
from moerl.sections import Count, CountOrZero, Share
from moerl.tasks.data.section import SetEntry, SetKeys, SetName, check_place, check_set, data_sets
from moerl.tasks.data.splits import Cut
from moerl.tasks.data.task import RowsTask
from moerl.tasks.rewards.make import check_rewards, make_scorer
from moerl.tasks.rewards.section import FunctionReward, JudgeReward, Reward, RewardName
from moerl.tasks.section import TaskSection

_NOT_OPTIONS = ("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")


class DatasetTaskConfig(SetKeys, TaskSection):
    """Problems from data sets, and rewards by name."""

    may_change: ClassVar = frozenset[str]()

    name: Literal["dataset"] = Field(description="Task.")
    sets: dict[SetName, SetEntry] = Field(
        description="Several sets by name, each with keys of its own in place of those of the task, and a weight."
    )
    text_as: Literal["user", "raw"] = Field(
        description="What a prompt that is a text is: a user's message for the chat template, or what the model"
        " continues as it is."
    )
    chat_options: dict[str, Any] = Field(
        description="Variables of the tokenizer's chat template, for example enable_thinking: false."
    )
    max_prompt_tokens: Count | None = Field(
        description="Longer prompts are left out, and counted; null = one that does not fit the model stops the run."
    )
    shuffle_seed: CountOrZero | None = Field(
        description="Seed of the order of the problems of each split; null = that of the files."
    )
    heldout_fraction: Share = Field(
        description="Share of training rows kept for the final numbers, if a set has no split for it."
    )
    dev_fraction: Share = Field(
        description="Share of training rows kept for evaluation while training, if a set has no split for it."
    )
    rewards: dict[RewardName, Reward] = Field(description="Rewards by name; what is trained on is their weighted sum.")
    accuracy: str | None = Field(description="Name of the reward that is reported as accuracy; null = the first.")
    thinking_end: Annotated[str, Field(min_length=1)] | None = Field(
        description="Text that ends thinking, for example </think>: rewards see what follows the last of it, and"
        " nothing of a response without it; null = all of a response."
    )

    @property
    def template_options(self) -> Mapping[str, Any]:
        return self.chat_options

    @property
    def longest_prompt(self) -> int | None:
        return self.max_prompt_tokens

    @property
    def own_functions(self) -> tuple[str, ...]:
        return tuple(each.function for each in self.rewards.values() if isinstance(each, FunctionReward))

    @property
    def judges(self) -> tuple[str, ...]:
        return tuple(each.url for each in self.rewards.values() if isinstance(each, JudgeReward))

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(each.hub for each in data_sets(self, self.sets) if each.hub is not None and each.streaming)

    @property
    def hub_sets(self) -> tuple[str, ...]:
        return tuple(each.hub for each in data_sets(self, self.sets) if each.hub is not None and not each.streaming)

    @property
    def files(self) -> tuple[Path, ...]:
        own = tuple(each.path for each in data_sets(self, self.sets) if each.path is not None)
        return own + tuple(file for reward in self.rewards.values() for file in reward.files)

    def open(self) -> RowsTask:
        sets = data_sets(self, self.sets)
        scorer = make_scorer(self.rewards, self.accuracy)
        cut = Cut(self.dev_fraction, self.heldout_fraction, self.shuffle_seed, self.text_as)
        keys = f"task.response={self.response!r}"
        columns = {
            f"task.rewards.{name}.{key}": found
            for name, reward in self.rewards.items()
            for key, found in reward.columns.items()
        }
        return RowsTask(sets, cut, scorer, response_keys=keys, thinking_end=self.thinking_end, columns=columns)

    def check(self, *, sft_steps: int) -> None:
        for data in data_sets(self, self.sets):
            check_set(data)
        if self.heldout_fraction + self.dev_fraction >= 1.0:
            raise ConfigError(
                "task.heldout_fraction and task.dev_fraction: nothing is left to train on",
                seen=f"{self.heldout_fraction} + {self.dev_fraction}",
                expected="a sum below 1",
                remedy="lower one of them, for example task.heldout_fraction=0.1",
            )
        taken = sorted(self.chat_options.keys() & set(_NOT_OPTIONS))
        if taken:
            raise ConfigError(
                f"task.chat_options.{taken[0]}: not an option of a template",
                seen=taken[0],
                expected="a variable that the template reads, such as enable_thinking",
                remedy="leave it away: messages and tools come from the rows",
            )
        if self.thinking_end is not None and self.chat_options.get("enable_thinking") is False:
            raise ConfigError(
                "task.thinking_end: the prompt ends thinking already, and no response would have a reward",
                seen=f"{self.thinking_end!r} with task.chat_options.enable_thinking=false",
                expected="one of them",
                remedy="set task.thinking_end=null",
            )
        check_rewards(self.rewards, self.accuracy)

    def check_files(self) -> None:
        for data in data_sets(self, self.sets):
            check_place(data)
        if not self.rewards:
            raise ConfigError(
                "task.rewards: there is none",
                seen="{}",
                expected="one or more, by name",
                remedy="for example task.rewards.answer.kind=math task.rewards.answer.column=answer",
            )
