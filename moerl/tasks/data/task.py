"""Problems from rows, and their rewards, for `task=dataset` and `task=jsonl`. Runs in the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from moerl.contract.ports import ChatTask, DemonstrationTask, Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError, RewardError
from moerl.tasks.data.rows import Problem
from moerl.tasks.data.section import DataSet
from moerl.tasks.data.splits import SPLITS, Cut, join, rewritten, split_set
from moerl.tasks.rewards.process import UNSCORED, MakeChild
from moerl.tasks.rewards.scorer import RewardScorer
from moerl.telemetry.terminal import excerpt

DUMMY_RESPONSE = "This text tries the reward function; no model wrote it."
"""Response on which rewards are tried if no row has a demonstration."""


class RowsTask(DemonstrationTask, ChatTask):
    """Rows of one or several sets; those that have responses are demonstrations.

    Args:
        sets: read at once.
        scorer: gives the rewards; closed with the task.
        response_keys: override that names the column of demonstrations, for errors.
        thinking_end: rewards see the text behind its last occurrence; None = all of a response.
        columns: columns that rewards read in every row, by the key that names them.
    """

    open_vocabulary = True
    """The texts of this task may hold any character."""

    def __init__(
        self,
        sets: Sequence[DataSet],
        cut: Cut,
        scorer: RewardScorer,
        *,
        response_keys: str,
        thinking_end: str | None = None,
        columns: Mapping[str, Sequence[str]] = {},
    ) -> None:
        self._columns = columns
        self._scorer, self._response_keys, self._thinking_end = scorer, response_keys, thinking_end
        found = [split_set(data, cut) for data in sets]
        self._notes = [each.describe() for each in found]
        self._splits: dict[str, list[Problem]] = {split: join(found, split, cut.seed) for split in SPLITS}
        self._index()

    def _index(self) -> None:
        self._problems = {each.prompt.prompt_id: each for split in SPLITS for each in self._splits[split]}

    def size(self, split: str) -> int:
        """Counts the prompts of a split."""
        return len(self._of(split))

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split. `ConfigError` if the split has fewer."""
        problems = self._of(split)
        if not 0 <= count <= len(problems):
            raise ConfigError(
                f"the {split} split of the data does not have that many prompts",
                seen=count,
                expected=f"0 to {len(problems)}",
                remedy="add rows, ask for fewer prompts, or change task.dev_fraction and task.heldout_fraction",
            )
        return [each.prompt for each in problems[:count]]

    def reward(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Future[dict[str, float]]:
        """Asks for the rewards of the text, whatever the finish reason. The future raises `RewardError`, with the row,
        if one of the rewards fails: the sample then has no reward, which is not a reward of 0. It raises `ConfigError`
        if no sample can have one."""
        if self._thinking_end is not None:
            # A response that is cut off in its thinking has no answer, whatever it drafted.
            _, end, after = response.rpartition(self._thinking_end)
            response = after if end else ""
        return self._score(prompt, response)

    def _score(self, prompt: Prompt, answer: str) -> Future[dict[str, float]]:
        return self._scorer.score(prompt, self.place(prompt), answer)

    def place(self, prompt: Prompt) -> str:
        """Returns the file and line, or the set and row, of a prompt."""
        return self._problems[prompt.prompt_id].place

    def check(self, *, num_demonstrations: int) -> None:
        """Checks that there are demonstrations, a row at all, and in every row what rewards read. Raises
        `ConfigError`."""
        self.demonstrations(self.prompts("train", num_demonstrations), seed=0)
        self._firsts()
        for key, columns in self._columns.items():
            for column in columns:
                self._check_column(key, column)

    def _check_column(self, key: str, column: str) -> None:
        for split in SPLITS:
            problems = self._of(split)
            lacking = [each for each in problems if each.prompt.facts.get(column) is None]
            if lacking:
                names = ", ".join(map(repr, lacking[0].prompt.facts))
                raise ConfigError(
                    f"{key}: rows of the {split} split have no value in column {column!r}",
                    seen=f"{len(lacking)} of {len(problems)}, first {lacking[0].place}, with {excerpt(names, 120)}",
                    expected="a value in every row, or no sample of it has a reward",
                    remedy="name another column, correct the rows, or leave them out by a filter on this column"
                    " (task.filters), which no row without a value passes",
                )

    def _firsts(self) -> list[Problem]:
        """Returns the first problem of each split that has one, with a demonstration if there is any. Raises
        `ConfigError` if no split has a problem."""
        splits = [problems for split in SPLITS if (problems := self._of(split))]
        firsts = [next((each for each in split if each.response is not None), split[0]) for split in splits]
        if not firsts:
            raise ConfigError(
                "task: no row is left",
                seen="; ".join(self._notes),
                expected="problems to train on",
                remedy="check the files and task.filters",
            )
        return firsts

    def try_rewards(self) -> None:
        """Asks for the rewards of one response to a row of each split: of a demonstration, or of a dummy if the row has
        none."""
        for first in self._firsts():
            self._try_rewards(first)

    def _try_rewards(self, first: Problem) -> None:
        response = DUMMY_RESPONSE if first.response is None else first.response
        try:
            rewards = self._score(first.prompt, response).result()
        except RewardError as error:
            raise ConfigError(
                f"task.reward: tried before the run, {error.what}",
                seen=error.seen,
                expected=error.expected,
                remedy=error.remedy,
            ) from error
        unscored = [name for name, value in rewards.items() if name.endswith(f".{UNSCORED}") and value]
        if unscored:
            # A harmless response fails, so others will fail, too, and each would silently get 0.
            raise ConfigError(
                f"task.rewards.{unscored[0].removesuffix(f'.{UNSCORED}')}: tried before the run, it could not score a"
                f" response to {self.place(first.prompt)}",
                seen=f"'{excerpt(response)}'",
                expected="a reward within the limits of time and memory",
                remedy="check its pattern or its row, or raise its timeout_seconds or memory_bytes",
            )

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
        problems = self._of("train")[:count]
        prompts = [text for each in problems for text in _texts(each.prompt)]
        return prompts + [each.response for each in problems if each.response is not None]

    @property
    def has_chats(self) -> bool:
        return any(each.prompt.chat is not None for each in self._problems.values())

    def write_prompts(self, write: Callable[[Prompt], Prompt | None]) -> None:
        def written(each: Problem) -> Problem | None:
            prompt = write(each.prompt)
            return None if prompt is None else replace(each, prompt=prompt)

        for split in SPLITS:
            self._splits[split], left_out = rewritten(self._splits[split], written)
            for source, count in left_out.items():
                self._notes.append(
                    f"{f'data {source}'.strip()}: {count} prompts of {split} left out (task.max_prompt_tokens)"
                )
        self._index()

    @property
    def num_reward_processes(self) -> int:
        """Most processes that functions of the rewards run in."""
        return self._scorer.num_processes

    def place_rewards(self, make_child: MakeChild) -> None:
        """Runs the functions of the rewards in processes that `make_child` starts. Call while no reward is awaited."""
        self._scorer.place(make_child)

    def notes(self) -> list[str]:
        return list(self._notes)

    def close(self) -> None:
        """Ends the processes of the rewards, and all that they have started."""
        self._scorer.close()

    def _of(self, split: str) -> list[Problem]:
        if split not in self._splits:
            raise ConfigError(
                "unknown split", seen=split, expected=", ".join(SPLITS), remedy="name one of these splits"
            )
        return self._splits[split]


def _texts(prompt: Prompt) -> list[str]:
    """Returns the texts of a prompt that a tokenizer will have to encode."""
    return [prompt.text] if prompt.chat is None else [str(each["content"]) for each in prompt.chat.messages]
