"""Splits of problems, their order, and their repetitions. Pure but for the reading; runs in the controller.

No prompt is in two splits of a set: a hash of the prompt decides the split of training rows,
and prompts that the set's own held-out split shares with its training split are left out of the latter.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from moerl.errors import ConfigError
from moerl.tasks.data.rows import Problem, problem, stays
from moerl.tasks.data.section import DataSet, Split
from moerl.tasks.data.sources import read_set

SPLITS: tuple[Split, ...] = ("train", "dev", "heldout")

MAX_EPOCH = 1 << 24
"""Prompts of one epoch, those that a weight repeats counted each time."""


@dataclass(slots=True)
class SplitSet:
    """The problems of one set by split, and the numbers of rows left out."""

    data: DataSet
    """The set."""
    problems: dict[str, list[Problem]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    """By split, its problems in the order of the rows."""
    num_filtered: int = 0
    """Rows left out by a filter."""
    num_repeated: int = 0
    """Rows left out because another split has their prompt."""

    def describe(self) -> str:
        """Returns one line for the user."""
        sizes = ", ".join(f"{split} {len(self.problems[split])}" for split in SPLITS)
        left_out = {
            "left out by filters": self.num_filtered,
            "left out of one split because another has the same prompt": self.num_repeated,
        }
        name = self.data.name or self.data.hub or (self.data.path.name if self.data.path else "")
        return f"data {name}: {sizes}" + "".join(f"; rows {count} {what}" for what, count in left_out.items() if count)


@dataclass(frozen=True, slots=True)
class Cut:
    """Settings that turn rows into splits."""

    dev: float
    """Share of a set's training rows for dev, if the set has no dev split of its own; 0 to 1."""
    heldout: float
    """The same share for heldout."""
    seed: int | None
    """Seed of the order of each split; None keeps that of the files."""
    text_as: str
    """Kind of a prompt that is a text, `raw` or `user`: see `problem`."""

    def check(self) -> None:
        """Raises `ConfigError` if no row is left to train on."""
        if self.heldout + self.dev >= 1.0:
            raise ConfigError(
                "task.heldout_fraction and task.dev_fraction: nothing is left to train on",
                seen=f"{self.heldout} + {self.dev}",
                expected="a sum below 1",
                remedy="lower one of them, for example task.heldout_fraction=0.1",
            )


def split_set(data: DataSet, cut: Cut) -> SplitSet:
    """Reads a set. Raises `ConfigError`, with the row, if the set cannot be read or a row is no problem."""
    found, seen = SplitSet(data), dict[bytes, str]()
    own = {split: rows for split in SPLITS if (rows := read_set(data, split, cut.seed or 0)) is not None}
    # A prompt in several splits of a set stays in the last of them.
    for split in reversed(SPLITS):
        for row in own.get(split, ()):
            if not stays(data, row):
                found.num_filtered += 1
                continue
            each = problem(data, row, text_as=cut.text_as)
            digest = hashlib.blake2b(each.key.encode(), digest_size=8).digest()
            where = split if split != "train" else _part(digest, cut, own.keys())
            if seen.setdefault(digest, where) != where:
                found.num_repeated += 1
                continue
            if split != "train":
                # Rows of another split may have the same numbers.
                name = each.prompt.prompt_id
                name = name if f"/{split}:" in name else f"{split}-{name}"
                each = replace(each, prompt=replace(each.prompt, prompt_id=name))
            found.problems[where].append(each)
    return found


def _part(digest: bytes, cut: Cut, own: Collection[str]) -> str:
    """Returns the split of a training row: a pure function of its prompt, and so the same whatever rows are added."""
    position = int.from_bytes(digest, "little") / 2**64
    dev = 0.0 if "dev" in own else cut.dev
    heldout = 0.0 if "heldout" in own else cut.heldout
    if position < dev:
        return "dev"
    return "heldout" if position < dev + heldout else "train"


def join(sets: Sequence[SplitSet], split: str, seed: int | None) -> list[Problem]:
    """Returns the problems of a split of all sets: shuffled by the seed, or in the order of the files.

    Weights decide the training split: an epoch has every prompt at least once, and repeats those of sets whose share is
    larger than their size. A repeated prompt has a number behind its id.

    Raises:
        ConfigError: weights make an epoch that is too long.
    """
    lists = [each.problems[split] for each in sets]
    weights = [each.data.weight for each in sets]
    if split == "train" and any(weight is not None for weight in weights):
        lists = _weighted(lists, weights)
    joined = [each for problems in lists for each in problems]
    if seed is not None:
        # Each split has draws of its own, so that none follows from another.
        random.Random(f"{seed}/{split}").shuffle(joined)
    return joined


def _weighted(lists: Sequence[list[Problem]], weights: Sequence[float | None]) -> list[list[Problem]]:
    total = sum(map(len, lists))
    given = sum(weight for weight in weights if weight is not None)
    num_given = sum(len(each) for each, weight in zip(lists, weights, strict=True) if weight is not None)
    # A set without a weight counts by its size, the others share what is theirs.
    shares = [
        len(each) / total if weight is None else weight / given * num_given / total
        for each, weight in zip(lists, weights, strict=True)
    ]
    length = max((len(each) / share for each, share in zip(lists, shares, strict=True) if share), default=0)
    if length > MAX_EPOCH:
        raise ConfigError(
            "task.sets: the weights make an epoch too long",
            seen=f"{length:,.0f} prompts, so that every prompt comes once",
            expected=f"at most {MAX_EPOCH:,}",
            remedy="lower max_rows of the set whose share is small, or raise its weight",
        )
    return [_repeated(each, round(length * share)) for each, share in zip(lists, shares, strict=True)]


def _repeated(problems: list[Problem], count: int) -> list[Problem]:
    """Returns `count` problems: each as often as the others, give or take one."""
    found = []
    for i in range(count if problems else 0):
        each, times = problems[i % len(problems)], i // len(problems)
        if times:
            prompt = replace(each.prompt, prompt_id=f"{each.prompt.prompt_id}~{times + 1}")
            each = replace(each, prompt=prompt)
        found.append(each)
    return found
