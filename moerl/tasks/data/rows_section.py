"""Settings of the tasks whose problems are rows of data sets. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from moerl.errors import ConfigError
from moerl.sections import Count, CountOrZero, Share
from moerl.tasks.data.section import DataSet, SetEntry, SetKeys, SetName, check_place, check_set
from moerl.tasks.data.splits import Cut
from moerl.tasks.section import TaskSection

_NOT_OPTIONS = ("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")


class RowsSection(SetKeys, TaskSection):
    """Sets of rows, how prompts are made of them, and how they are split."""

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

    @property
    def template_options(self) -> Mapping[str, Any]:
        return self.chat_options

    @property
    def longest_prompt(self) -> int | None:
        return self.max_prompt_tokens

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(each.hub for each in self.data_sets if each.hub is not None and each.streaming)

    @property
    def hub_sets(self) -> tuple[str, ...]:
        return tuple(each.hub for each in self.data_sets if each.hub is not None and not each.streaming)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(each.path for each in self.data_sets if each.path is not None)

    @property
    def data_sets(self) -> list[DataSet]:
        """Sets of rows, keys merged; without entries one set without a name."""
        common = {key: getattr(self, key) for key in SetKeys.model_fields}
        sets = []
        for name, entry in (self.sets or {"": SetEntry()}).items():
            own = {key: value for key, value in entry if value is not None}
            # A set with a place of its own does not have that of all sets.
            elsewhere = ("path", "hub") if {"path", "hub"} & own.keys() else ()
            values: dict[str, Any] = {**common, **dict.fromkeys(elsewhere), **own, "name": name}
            sets.append(DataSet(**values))
        return sets

    @property
    def cut(self) -> Cut:
        """Way in which sets are split."""
        return Cut(self.dev_fraction, self.heldout_fraction, self.shuffle_seed, self.text_as)

    @property
    def response_keys(self) -> str:
        """Override that names the column of demonstrations."""
        return f"task.response={self.response!r}"

    def check(self, *, sft_steps: int) -> None:
        for data in self.data_sets:
            check_set(data)
        self.cut.check()
        taken = sorted(self.chat_options.keys() & set(_NOT_OPTIONS))
        if taken:
            raise ConfigError(
                f"task.chat_options.{taken[0]}: not an option of a template",
                seen=taken[0],
                expected="a variable that the template reads, such as enable_thinking",
                remedy="leave it away: messages and tools come from the rows",
            )

    def check_files(self) -> None:
        for data in self.data_sets:
            check_place(data)
