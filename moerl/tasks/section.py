"""Base of a task's own settings: its keys, the rules between them, and how to open the task. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, ClassVar

from moerl.contract.ports import Task
from moerl.errors import ConfigError
from moerl.sections import Section

DEV_POOL = 512
"""Problems of the dev split; fewer if there are less than eight times as many problems."""
HELDOUT_POOL = 2048
"""Problems of the held-out split; fewer if there are less than four times as many problems."""


class TaskSection(Section):
    """Base of the ``task`` section of every task. A subclass gives `name` a literal type and adds its keys."""

    name: Any
    """Name of the task, by which a configuration chooses it."""
    may_change: ClassVar[Set[str]] = frozenset()
    """Keys that may have another value when a run is resumed."""
    plan_values: ClassVar[Mapping[str, str]] = {}
    """Values of mandatory keys that a plan uses if none are given; a plan reads no data."""

    @property
    def template_options(self) -> Mapping[str, Any]:
        """Variables of the chat template that turns messages into prompts."""
        return {}

    @property
    def longest_prompt(self) -> int | None:
        """Most tokens of a prompt; longer ones are left out. None = no limit."""
        return None

    @property
    def own_functions(self) -> tuple[str, ...]:
        """Functions of the user's own code that give rewards or play episodes, as package.module:function."""
        return ()

    @property
    def judges(self) -> tuple[str, ...]:
        """Addresses of models that rewards ask."""
        return ()

    @property
    def streams(self) -> tuple[str, ...]:
        """Data sets of the hub that are read over the network whenever the task is opened."""
        return ()

    @property
    def hub_sets(self) -> tuple[str, ...]:
        """Data sets of the hub that opening the task fetches into the cache."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Files and folders of the user's that the keys name."""
        return ()

    @abstractmethod
    def open(self) -> Task:
        """Opens the task, which the caller has to close. Raises `ConfigError` if the data is unusable."""

    def check(self, *, sft_steps: int) -> None:
        """Checks the rules between keys. Reads no files.

        Args:
            sft_steps: steps of the cold start, which learns from demonstrations; 0 without one.

        Raises:
            ConfigError: The first rule that is broken, with the dotted path of the key.
        """

    def check_files(self) -> None:
        """Checks that the files that the keys name are there. Raises `ConfigError`."""


def num_reserved(available: int) -> tuple[int, int]:
    """Returns the problems of the dev split, and of the held-out split, if there are `available` different ones."""
    return min(DEV_POOL, available // 8), min(HELDOUT_POOL, available // 4)


def of_split[T](splits: Mapping[str, T], split: str) -> T:
    """Returns what belongs to a split. Raises `ConfigError` if there is no such split."""
    if split not in splits:
        raise ConfigError("unknown split", seen=split, expected=", ".join(splits), remedy="name one of these splits")
    return splits[split]


def require_prompts(task: str, split: str, count: int, size: int, keys: str = "", remedy: str = "") -> None:
    """Raises `ConfigError` unless a split of `size` prompts has the first `count`.

    Args:
        keys: those to raise for more prompts.
        remedy: in place of `keys`.
    """
    if not 0 <= count <= size:
        raise ConfigError(
            f"the {split} split of {task} does not have that many prompts",
            seen=count,
            expected=f"0 to {size}",
            remedy=remedy or f"ask for fewer prompts, or raise {keys}",
        )
