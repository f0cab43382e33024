"""Choice of the prompt of each group, if a run has a curriculum: a group keeps its prompt over a resume. Runs in the
controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moerl.batching.curriculum import Curriculum, CurriculumRule
from moerl.config.schema import RLConfig
from moerl.contract.ports import Prompt
from moerl.contract.trajectory import Trajectory
from moerl.orchestration.selection import accuracy_of


class PromptChoice:
    """Prompts of groups by the groups' numbers. Threads that share one need a lock of their own."""

    def __init__(self, curriculum: Curriculum, prompts: Sequence[Prompt]) -> None:
        self._curriculum, self._prompts = curriculum, prompts
        self._index = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
        self._chosen: dict[int, int] = {}

    @classmethod
    def of(cls, loop: RLConfig, seed: int, prompts: Sequence[Prompt]) -> PromptChoice | None:
        """Makes the choice of a run; None if every prompt comes once in an epoch."""
        choice = CurriculumRule(loop.skip_above, loop.skip_below, loop.weigh_prompts == "variance")
        if choice.is_even:
            return None
        return cls(Curriculum(choice, len(prompts), loop.prompts_per_step, seed), prompts)

    def prompt(self, number: int) -> Prompt:
        """Returns the prompt of a group; chooses it at the first call for this group."""
        if number not in self._chosen:
            self._chosen[number] = self._curriculum.next()
        return self._prompts[self._chosen[number]]

    def learn(self, trajectories: Sequence[Trajectory]) -> None:
        """Updates the curriculum by the admitted responses of a group; without any, nothing changes."""
        if trajectories:
            right = [accuracy_of(trajectory) for trajectory in trajectories]
            self._curriculum.learn(self._index[trajectories[0].lineage.prompt_id], sum(right) / len(right))

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the run so far."""
        rates = [rate for rate, _ in self._curriculum.rates.values()]
        mean = {"curriculum/rate_mean": sum(rates) / len(rates)} if rates else {}
        return {"curriculum/passed": float(self._curriculum.num_passed), **mean}

    def snapshot(self, open_numbers: Iterable[Any]) -> dict[str, Any]:
        """Returns, as plain JSON, the state of the curriculum and the prompts of groups that are still open; forgets
        the prompts of all other groups."""
        numbers = {int(number) for number in open_numbers}
        self._chosen = {number: prompt for number, prompt in self._chosen.items() if number in numbers}
        return {**self._curriculum.snapshot(), "chosen": sorted(self._chosen.items())}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        self._curriculum.restore(snapshot)
        self._chosen = dict(snapshot["chosen"])
