"""Problems from rows, for the tasks that read data sets. Runs in the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from moerl.contract.ports import ChatTask, DemonstrationTask, Prompt
from moerl.errors import ConfigError
from moerl.tasks.data.rows import Problem
from moerl.tasks.data.section import DataSet
from moerl.tasks.data.splits import SPLITS, Cut, join, split_set
from moerl.tasks.section import of_split, require_prompts


class ProblemRows(DemonstrationTask, ChatTask):
    """Rows of one or several sets; those that have responses are demonstrations. A subclass says what rewards them.

    Args:
        sets: read at once.
        response_keys: override that names the column of demonstrations, for errors.
    """

    def __init__(self, sets: Sequence[DataSet], cut: Cut, *, response_keys: str) -> None:
        self._response_keys = response_keys
        found = [split_set(data, cut) for data in sets]
        self._notes = [each.describe() for each in found]
        self._splits: dict[str, list[Problem]] = {split: join(found, split, cut.seed) for split in SPLITS}
        self._index()

    def _index(self) -> None:
        self._problems = {each.prompt.prompt_id: each for split in SPLITS for each in self._splits[split]}

    def size(self, split: str) -> int:
        """Counts the prompts of a split."""
        return len(self.problems(split))

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split. `ConfigError` if the split has fewer."""
        problems = self.problems(split)
        remedy = "add rows, ask for fewer prompts, or change task.dev_fraction and task.heldout_fraction"
        require_prompts("the data", split, count, len(problems), remedy=remedy)
        return [each.prompt for each in problems[:count]]

    def place(self, prompt: Prompt) -> str:
        """Returns the file and line, or the set and row, of a prompt."""
        return self._problems[prompt.prompt_id].place

    def check(self, *, num_demonstrations: int) -> None:
        """Checks that there are demonstrations, and a row at all. Raises `ConfigError`."""
        self.demonstrations(self.prompts("train", num_demonstrations), seed=0)
        self.first_problems()

    def first_problems(self) -> list[Problem]:
        """Returns the first problem of each split that has one, with a demonstration if there is any. Raises
        `ConfigError` if no split has a problem."""
        splits = [problems for split in SPLITS if (problems := self.problems(split))]
        firsts = [next((each for each in split if each.response is not None), split[0]) for split in splits]
        if not firsts:
            raise ConfigError(
                "task: no row is left",
                seen="; ".join(self._notes),
                expected="problems to train on",
                remedy="check the files and task.filters",
            )
        return firsts

    def demonstrations(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """Returns the rows' responses; `seed` changes nothing, since a row has only one."""
        responses = [self._problems[prompt.prompt_id].response for prompt in prompts]
        missing = [p.prompt_id for p, text in zip(prompts, responses, strict=True) if text is None]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(prompts)} rows have no demonstration",
                seen=f"nothing under {self._response_keys} in {', '.join(missing[:3])}",
                expected="a response in every row used for supervised training",
                remedy=f"add responses, set {self._response_keys.split('=')[0]}, or start from a trained model with"
                " sft.steps=0",
            )
        return [text for text in responses if text is not None]

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns the prompts of the first `count` training rows, and their responses if there are any: a tokenizer is
        trained on them."""
        problems = self.problems("train")[:count]
        prompts: list[str] = []
        for each in problems:
            chat = each.prompt.chat
            prompts += [each.prompt.text] if chat is None else [str(message["content"]) for message in chat.messages]
        return prompts + [each.response for each in problems if each.response is not None]

    @property
    def has_chats(self) -> bool:
        return any(each.prompt.chat is not None for each in self._problems.values())

    def write_prompts(self, write: Callable[[Prompt], Prompt | None]) -> None:
        for split in SPLITS:
            written = [(each, write(each.prompt)) for each in self._splits[split]]
            self._splits[split] = [replace(each, prompt=prompt) for each, prompt in written if prompt is not None]
            left_out = Counter(each.prompt.source for each, prompt in written if prompt is None)
            self._notes += [
                f"{f'data {source}'.strip()}: {count} prompts of {split} left out (task.max_prompt_tokens)"
                for source, count in left_out.items()
            ]
        self._index()

    def notes(self) -> list[str]:
        return list(self._notes)

    def problems(self, split: str) -> list[Problem]:
        """Returns the problems of a split. `ConfigError` if there is no such split."""
        return of_split(self._splits, split)
