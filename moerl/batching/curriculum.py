"""Choice of the prompts of groups by how often earlier groups of a prompt were right. Pure; runs in the controller.

An epoch is the seeded order of `moerl.batching.order`. The cursor walks through it, and takes prompts or passes over
them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moerl.batching.order import epoch_permutation
from moerl.config.schema import RLConfig
from moerl.contract.ports import Prompt

FORGET_EPOCHS = 4
"""Epochs after which a prompt comes again, whatever its rate was: the policy is another one by then."""

SMALLEST_WEIGHT = 0.1
"""Smallest chance of a prompt that is weighed by variance: that of one that is always or never solved."""


class Curriculum:
    """Prompts of groups by the groups' numbers: a group keeps its prompt over a resume. Threads that share a curriculum
    need a lock of their own.

    With p the share of right responses in the latest group of a prompt: prompts with a p above `rl.skip_above` or below
    `rl.skip_below` are passed over, others are taken, or with `rl.weigh_prompts=variance` taken with the chance
    4 p (1 - p), `SMALLEST_WEIGHT` at least. `rl.prompts_per_step` prompts in a row are different ones, if there are as
    many.

    Args:
        seed: of the order and of the chances.
        prompts: of the run, at least one.
    """

    def __init__(self, loop: RLConfig, seed: int, prompts: Sequence[Prompt]) -> None:
        self._loop, self._seed, self._prompts = loop, seed, prompts
        self._index = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
        # Places of all epochs that were looked at, and those of them that were passed over.
        self._cursor = self._num_passed = 0
        # By prompt, the share of right responses in its latest group, and the epoch in which that came.
        self._rates: dict[int, tuple[float, int]] = {}
        # The latest prompts, and the prompts of open groups, by index.
        self._recent, self._chosen = list[int](), dict[int, int]()

    @classmethod
    def of(cls, loop: RLConfig, seed: int, prompts: Sequence[Prompt]) -> Curriculum | None:
        """Returns the curriculum of a run; None if every prompt comes once in an epoch."""
        is_even = loop.skip_above is None and loop.skip_below is None and loop.weigh_prompts == "even"
        return None if is_even else cls(loop, seed, prompts)

    def prompt(self, number: int) -> Prompt:
        """Returns the prompt of a group; chooses it at the first call for this group."""
        if number not in self._chosen:
            self._chosen[number] = self._next()
        return self._prompts[self._chosen[number]]

    def learn(self, prompt_id: str, rate: float) -> None:
        """Notes that a group of a prompt has come. rate: share of right responses in it."""
        self._rates[self._index[prompt_id]] = (rate, self._at(self._cursor)[1])

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the run so far."""
        rates = [rate for rate, _ in self._rates.values()]
        mean = {"curriculum/rate_mean": sum(rates) / len(rates)} if rates else {}
        return {"curriculum/passed": float(self._num_passed), **mean}

    def snapshot(self, open_numbers: Iterable[int]) -> dict[str, Any]:
        """Returns the state as plain JSON, with the prompts of groups that are still open; forgets the prompts of all
        other groups."""
        numbers = set(open_numbers)
        self._chosen = {number: prompt for number, prompt in self._chosen.items() if number in numbers}
        return {
            "cursor": self._cursor,
            "passed": self._num_passed,
            "recent": self._recent.copy(),
            "rates": [[prompt, rate, epoch] for prompt, (rate, epoch) in self._rates.items()],
            "chosen": sorted(self._chosen.items()),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Takes over the state of a checkpoint."""
        self._cursor, self._num_passed = snapshot["cursor"], snapshot["passed"]
        self._recent, self._chosen = list(snapshot["recent"]), dict(snapshot["chosen"])
        self._rates = {prompt: (rate, epoch) for prompt, rate, epoch in snapshot["rates"]}

    def _next(self) -> int:
        """Returns the next prompt. If a whole epoch of them is passed over, the next one that is not among the latest
        is taken all the same."""
        for _ in self._prompts:
            prompt, epoch = self._at(self._cursor)
            if self._is_taken(prompt, epoch):
                return self._take(prompt)
            self._cursor += 1
            self._num_passed += 1
        while self._at(self._cursor)[0] in self._recent:
            self._cursor += 1
        return self._take(self._at(self._cursor)[0])

    def _at(self, place: int) -> tuple[int, int]:
        """Returns prompt and epoch of a place."""
        epoch, number = divmod(place, len(self._prompts))
        return int(epoch_permutation(len(self._prompts), epoch, self._seed)[number]), epoch

    def _is_taken(self, prompt: int, epoch: int) -> bool:
        if prompt in self._recent:
            return False
        rate, learned = self._rates.get(prompt, (0.0, epoch - FORGET_EPOCHS - 1))
        if epoch - learned > FORGET_EPOCHS:
            return True
        # A draw of its own for each place, so that a run that goes on draws the same.
        return random.Random(f"{self._seed}/{self._cursor}").random() < self._chance(rate)

    def _chance(self, rate: float) -> float:
        """Returns the chance to take a prompt with this share of right responses."""
        above, below = self._loop.skip_above, self._loop.skip_below
        if (above is not None and rate > above) or (below is not None and rate < below):
            return 0.0
        return max(SMALLEST_WEIGHT, 4 * rate * (1 - rate)) if self._loop.weigh_prompts == "variance" else 1.0

    def _take(self, prompt: int) -> int:
        self._cursor += 1
        most = min(self._loop.prompts_per_step, len(self._prompts)) - 1
        self._recent = [*self._recent, prompt][-most:] if most else []
        return prompt
