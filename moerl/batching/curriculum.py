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
"""After so many epochs a prompt comes again whatever was known of it: the policy is another one by then."""

SMALLEST_WEIGHT = 0.1
"""Smallest chance under `CurriculumRule.by_variance`: that of a prompt that is always or never solved."""


@dataclass(frozen=True, slots=True)
class CurriculumRule:
    """Rule by which prompts are taken, from the share p of right responses in their latest group.

    skip_above, skip_below: prompts beyond are passed over; None = none is. by_variance: other prompts are taken with
    the chance 4 p (1 - p), `SMALLEST_WEIGHT` at least.
    """

    skip_above: float | None = None
    skip_below: float | None = None
    by_variance: bool = False

    @property
    def is_even(self) -> bool:
        """True where every prompt is taken."""
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
    """The prompts of a run, one after the other.

    num_prompts: >= 1. block: so many prompts in a row are different ones, where there are as many.

    Attributes:
        cursor: places of all epochs that were looked at. num_passed: of them, passed over.
        rates: by prompt, the share of right responses in its latest group, and the epoch of that.
    """

    choice: CurriculumRule
    num_prompts: int
    block: int
    seed: int
    cursor: int = 0
    num_passed: int = 0
    rates: dict[int, tuple[float, int]] = field(default_factory=dict)
    _recent: list[int] = field(default_factory=list)

    def next(self) -> int:
        """The next prompt. Where a whole epoch of them is passed over, the one at the cursor is taken all the same."""
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
        """A group of a prompt has come. rate: share of right responses in it."""
        self.rates[prompt] = (rate, self._at(self.cursor)[1])

    def snapshot(self) -> dict[str, Any]:
        """Plain JSON."""
        rates = [[prompt, rate, epoch] for prompt, (rate, epoch) in self.rates.items()]
        return {"cursor": self.cursor, "passed": self.num_passed, "recent": self._recent.copy(), "rates": rates}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Takes over the state of a checkpoint."""
        self.cursor, self.num_passed = snapshot["cursor"], snapshot["passed"]
        self._recent = list(snapshot["recent"])
        self.rates = {prompt: (rate, epoch) for prompt, rate, epoch in snapshot["rates"]}

    def _at(self, place: int) -> tuple[int, int]:
        """Prompt and epoch of a place."""
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
