"""Prompts of environments that have seeds in place of a data set: settings and splits. Runs in the controller."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from moerl.contract.episodes import EpisodeTask, Session
from moerl.contract.ports import ChatTask, Prompt
from moerl.errors import ConfigError, EpisodeError
from moerl.sections import Count, Positive
from moerl.tasks.games.talk import Talk, chat_of
from moerl.tasks.section import TaskSection, of_split, require_prompts

FIRST_SEED = {"train": 0, "dev": 1_000_000_000, "heldout": 2_000_000_000}
"""First seed of each split; none reaches 2**31, which some libraries do not take."""
NumSeeds = Annotated[int, Field(ge=1, le=10_000_000)]
_SHOWN = 80


class SeedsSection(TaskSection):
    """Seeds of the splits, and the form of an environment's texts."""

    num_train: NumSeeds = Field(description="Seeds of the training split; each begins one game.")
    num_dev: NumSeeds = Field(description="Seeds of the dev split.")
    num_heldout: NumSeeds = Field(description="Seeds of the held-out split.")
    text_as: Literal["raw", "chat"] = Field(
        description="raw = plain lines; chat = messages of a user, by the model's chat template."
    )
    max_turn_tokens: Count | None = Field(
        description="Most tokens of a turn; null = as many as rollout.max_new_tokens leaves."
    )
    turn_seconds: Positive = Field(
        description="Longest time that the environment may take between two requests of an episode."
    )


class SeedsTask[C: SeedsSection](EpisodeTask, ChatTask):
    """Prompts that are the first texts of an environment, one for each seed. A subclass plays them.

    The splits have different seeds. An environment with few beginnings has the same ones in each.
    """

    def __init__(self, config: C) -> None:
        self.config, self.turn_seconds = config, config.turn_seconds
        self._sizes = {"train": config.num_train, "dev": config.num_dev, "heldout": config.num_heldout}
        self._prompts: dict[str, list[Prompt]] = {split: [] for split in self._sizes}

    @abstractmethod
    def openings(self, seeds: Sequence[int]) -> list[str]:
        """Returns the first text of the environment for each seed.

        Raises:
            ConfigError: the environment does not begin.
        """

    def size(self, split: str) -> int:
        """Counts the prompts of a split."""
        return of_split(self._sizes, split)

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split, begun when needed. `ConfigError` if the split has fewer."""
        require_prompts(self.config.name, split, count, self.size(split), f"task.num_{split}")
        known = self._prompts[split]
        if len(known) < count:
            seeds = [FIRST_SEED[split] + number for number in range(len(known), count)]
            for seed, opening in zip(seeds, self.openings(seeds), strict=True):
                text, chat = ("", chat_of(opening)) if self.has_chats else (f"{opening}\n", None)
                prompt_id = f"{self.config.name}-{split}-{seed - FIRST_SEED[split]}"
                known.append(Prompt(prompt_id, text, {"seed": seed, "opening": opening}, chat))
        return known[:count]

    @property
    def has_chats(self) -> bool:
        return self.config.text_as == "chat"

    def write_prompts(self, write: Callable[[Prompt], Prompt | None]) -> None:
        for split, size in self._sizes.items():
            written = [write(prompt) for prompt in self.prompts(split, size)]
            self._prompts[split] = [prompt for prompt in written if prompt is not None]
            self._sizes[split] = len(self._prompts[split])

    def talk(self, prompt: Prompt, session: Session, opening: str) -> Talk:
        """Returns the talk of an episode whose environment has begun with a text.

        Raises:
            EpisodeError: its prompt says another one: the episodes of a group would not play the same.
        """
        if opening != prompt.facts["opening"]:
            raise EpisodeError(
                f"{prompt.prompt_id}: the environment begins differently with the same seed",
                seen=repr(opening)[:_SHOWN],
                expected=repr(prompt.facts["opening"])[:_SHOWN],
                remedy="give the environment a seed that it obeys",
            )
        return Talk.of(prompt, session, self.config.max_turn_tokens)


def require_package(package: str, task: str) -> None:
    """Raises ConfigError if a package that a task needs is not installed. Imports nothing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of this name in the current directory is none
        raise ConfigError(
            f"task={task}: {package} is not installed",
            seen=f"no package {package}",
            expected="what it needs in the environment of moerl",
            remedy='pip install "moerl[environments]"',
        )
