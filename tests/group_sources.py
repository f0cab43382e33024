"""Sources of groups with an engine that answers as a test says, for tests of what becomes of its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from factories import SPEC, make_trajectory

from moerl.buffer.journal import Journal
from moerl.config.load import load_config
from moerl.contract.ports import Prompt, RolloutRequest
from moerl.contract.quarantine import Quarantine, Refusal
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.orchestration.engines import group_plan
from moerl.orchestration.groups import GroupSource
from moerl.orchestration.groups_ahead import group_source
from moerl.orchestration.outcome import RolloutOutcome
from moerl.orchestration.scoring import Scoring

PROMPTS = [Prompt(f"p{i}", f"{i}+1=") for i in range(12)]
Answer = Callable[[str, int], Trajectory | list[Trajectory] | str | None]
"""Function that returns a rollout by its id and the version: one trajectory, those of an episode, None if the rollout
is refused, or the reason for which it is left out."""


def answer(
    rollout_id: str, version: int, *, reward: float | None = None, num_sampled: int = 5, **changes: Any
) -> Trajectory:
    group, _, number = rollout_id.rpartition("/")
    prompt = group.rpartition("/")[2]
    made = make_trajectory(np.random.default_rng(0), num_sampled=num_sampled)
    changes.setdefault("policy_versions", np.where(made.sampled, np.int32(version), np.int32(-1)))
    rewards = {"reward": float(number) if reward is None else reward, "accuracy": 0.0}
    return replace(made, lineage=Lineage(rollout_id, prompt, group), rewards=rewards, **changes)


class FakeCollector:
    """Answers at once, in an order of its own. asked: rollout ids of every call. watched: numbers of those done.
    answers_all: False if rollouts that would be refused get no answer at all."""

    answers_all = True

    def __init__(self, answers: Answer) -> None:
        self._answers = answers
        self.asked: list[list[str]] = []
        self.told: list[tuple[int, int]] = []
        self.watched: list[int] = []
        self.said: list[str] = []
        self.notify = self.said.append
        self.scoring = Scoring({})
        self.quarantine = Quarantine(FOLDERS[-1] / "quarantine", max_rate=1.0)

    def watch(self, done: int, total: int, tokens: int) -> None:
        assert 0 <= done <= total
        self.watched.append(done)

    def requests(self, prompts: Sequence[Prompt], *, run: str, count: int, **_: Any) -> list[RolloutRequest]:
        return [
            RolloutRequest(Lineage(f"{run}/{p.prompt_id}/{i}", p.prompt_id, f"{run}/{p.prompt_id}"), (1,), SAMPLING, 4)
            for p in prompts
            for i in range(count)
        ]

    def outcomes(
        self, prompts: Sequence[Prompt], requests: Sequence[RolloutRequest], version: Callable[[], int], *_: object
    ) -> Generator[RolloutOutcome]:
        ids = [request.lineage.rollout_id for request in requests]
        self.asked.append(ids)
        for name in sorted(ids):
            found = self._answers(name, version())
            if found is None and not self.answers_all:
                continue
            if isinstance(found, str):
                yield RolloutOutcome(name, (answer(name, version()),), filtered=found)
                continue
            yield RolloutOutcome(
                name,
                tuple(found) if isinstance(found, list) else () if found is None else (found,),
                Refusal("routing_rows", "routing_rows in x, 7") if found is None else None,
            )

    def tell_refused(self, purpose: str, num_refused: int, num_asked: int, first: str) -> None:
        assert bool(first) == bool(num_refused)
        self.told.append((num_refused, num_asked))


SAMPLING = SamplingParams()
FOLDERS: list[Path] = []
"""Folder of the running test, as the only entry."""


def source(answers: Answer, *overrides: str) -> tuple[GroupSource, FakeCollector]:
    sizes = ("recipe=tiny", "rl.steps=8", "rl.prompts_per_step=3", "rl.group_size=4")
    config = load_config([*sizes, *overrides], command="train")
    collector: Any = FakeCollector(answers)
    groups = group_source(group_plan(config), collector, PROMPTS, "rl", Journal(FOLDERS[-1] / "journal", SPEC))
    groups.restore({}, 0)
    return groups, collector


def trained(groups: GroupSource) -> None:
    """A step, after which engines hold its weights."""
    groups.trained()
    groups.expect_update()(None)


def group_ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(t.lineage.group_id for t in trajectories))


IN_PROCESS = ("rollout.placement=process", "buffer.max_staleness=1")


class Gate:
    """Rollouts of a step are answered once the gate is open for it."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, rollout_id: str, version: int) -> Trajectory:
        with self._changed:
            self._changed.wait_for(lambda: any(rollout_id.startswith(each) for each in self._open))
        return answer(rollout_id, version)

    def open(self, prefix: str) -> None:
        with self._changed:
            self._open.add(prefix)
            self._changed.notify_all()
