"""Choice of the next prompt by how often its earlier groups were right. Pure; runs in the controller.

An epoch is the seeded order of `moerl.batching.order`. The cursor walks through it, and takes prompts or passes over
them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moerl.batching.order import epoch_permutation

FORGET_EPOCHS = 4
"""Epochs after which a prompt comes again, whatever its rate was: the policy is another one by then."""

SMALLEST_WEIGHT = 0.1
"""Smallest chance under `CurriculumRule.by_variance`: that of a prompt that is always or never solved."""


@dataclass(frozen=True, slots=True)
class CurriculumRule:
    """Rule by which prompts are taken, from the share p of right responses in their latest group."""

    skip_above: float | None = None
    """Prompts with a larger p are passed over; None passes over none."""
    skip_below: float | None = None
    """Prompts with a smaller p are passed over; None passes over none."""
    by_variance: bool = False
    """True if other prompts are taken with the chance 4 p (1 - p), `SMALLEST_WEIGHT` at least; False takes all."""

    @property
    def is_even(self) -> bool:
        """True if every prompt is taken."""
        return self.skip_above is None and self.skip_below is None and not self.by_variance

    def chance(self, rate: float) -> float:
        """Returns the chance to take a prompt with this share of right responses."""
        if self.skip_above is not None and rate > self.skip_above:
            return 0.0
        if self.skip_below is not None and rate < self.skip_below:
            return 0.0
        return max(SMALLEST_WEIGHT, 4 * rate * (1 - rate)) if self.by_variance else 1.0


@dataclass(slots=True)
class Curriculum:
    """The prompts of a run, one after the other."""

    choice: CurriculumRule
    """Rule by which prompts are taken."""
    num_prompts: int
    """Prompts of the run, >= 1."""
    block: int
    """So many prompts in a row are different ones, if there are as many."""
    seed: int
    """Seed of the order and of the chances."""
    cursor: int = 0
    """Places of all epochs that were looked at."""
    num_passed: int = 0
    """Places that were passed over."""
    rates: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By prompt, the share of right responses in its latest group, and the epoch in which that came."""
    _recent: list[int] = field(default_factory=list)

    def next(self) -> int:
        """Returns the next prompt. If a whole epoch of them is passed over, the next one that is not among the latest
        is taken all the same."""
        for _ in range(self.num_prompts):
            prompt, epoch = self._at(self.cursor)
            if self._is_taken(prompt, epoch):
                return self._take(prompt)
            self.cursor += 1
            self.num_passed += 1
        while self._at(self.cursor)[0] in self._recent:
            self.cursor += 1
        return self._take(self._at(self.cursor)[0])

    def learn(self, prompt: int, rate: float) -> None:
        """Notes that a group of a prompt has come. rate: share of right responses in it."""
        self.rates[prompt] = (rate, self._at(self.cursor)[1])

    def snapshot(self) -> dict[str, Any]:
        """Returns the state as plain JSON."""
        rates = [[prompt, rate, epoch] for prompt, (rate, epoch) in self.rates.items()]
        return {"cursor": self.cursor, "passed": self.num_passed, "recent": self._recent.copy(), "rates": rates}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Takes over the state of a checkpoint."""
        self.cursor, self.num_passed = snapshot["cursor"], snapshot["passed"]
        self._recent = list(snapshot["recent"])
        self.rates = {prompt: (rate, epoch) for prompt, rate, epoch in snapshot["rates"]}

    def _at(self, place: int) -> tuple[int, int]:
        """Returns prompt and epoch of a place."""
        epoch, number = divmod(place, self.num_prompts)
        return int(epoch_permutation(self.num_prompts, epoch, self.seed)[number]), epoch

    def _is_taken(self, prompt: int, epoch: int) -> bool:
        if prompt in self._recent:
            return False
        rate, learned = self.rates.get(prompt, (0.0, epoch - FORGET_EPOCHS - 1))
        if epoch - learned > FORGET_EPOCHS:
            return True
        # A draw of its own for each place, so that a run that goes on draws the same.
        return random.Random(f"{self.seed}/{self.cursor}").random() < self.choice.chance(rate)

    def _take(self, prompt: int) -> int:
        self.cursor += 1
        most = min(self.block, self.num_prompts) - 1
        self._recent = [*self._recent, prompt][-most:] if most else []
        return prompt
