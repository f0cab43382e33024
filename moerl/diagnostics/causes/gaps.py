"""Gaps of dumped rollouts under assumptions: how far their log-probs are from a model's, if it scores them so.

An assumption is a way to score: with which experts, inside of which kept sets, at which temperature and weights,
after which repairs of the dump. Causes are found by comparing gaps. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Interval
from moerl.diagnostics.scoring import Question, Scored, Scorer

RESAMPLES = 400
"""Bootstrap samples of rollouts behind every interval."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A change of rollouts that takes a fault back. name: unique. apply: pure."""

    name: str
    apply: Callable[[DumpedRollout], DumpedRollout]


@dataclass(frozen=True, slots=True)
class Assumption:
    """How rollouts are scored.

    routing: with the experts of the (repaired) dump, or the model's own. kept: inside of its kept sets, over the
    vocabulary, or inside of sets that a top-p filter of this value would have kept. factor: times the temperatures of
    the dump. weights: number of the scorer; None: the one whose version the dump names. repairs: in order.
    """

    routing: Literal["own", "recorded"] = "own"
    kept: Literal["listed", "full"] | float = "full"
    factor: float = 1.0
    weights: int | None = None
    repairs: tuple[Repair, ...] = ()

    def with_repair(self, repair: Repair) -> Assumption:
        return replace(self, repairs=(*self.repairs, repair))


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """d = model's log-prob less the rollout's, of every sampled token, rollout after rollout.

    d_N: float64, nats. starts: int64 [rollouts + 1].
    """

    d_N: NDArray[np.float64]
    starts: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.float64]:
        return np.abs(self.d_N)

    @property
    def mean(self) -> float:
        """Mean |d|."""
        return float(self.sizes.mean())


@dataclass(slots=True)
class Gaps:
    """Scores rollouts under assumptions, each combination of experts, repairs and weights once.

    scorers: at least one. special: assigns rollouts to scorers by the version that the dump names, where several
    scorers have one.
    """

    rollouts: Sequence[DumpedRollout]
    scorers: Sequence[Scorer]
    question: Question = field(default_factory=Question)
    _scored: dict[tuple[object, ...], list[Scored]] = field(default_factory=dict)
    _repaired: dict[tuple[str, ...], list[DumpedRollout]] = field(default_factory=dict)

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(rollout.num_sampled for rollout in self.rollouts)])

    @property
    def rollout_logprobs(self) -> NDArray[np.float64]:
        parts = [rollout.rollout_logprobs[rollout.sampled] for rollout in self.rollouts]
        return np.concatenate(parts).astype(np.float64)

    def repaired(self, repairs: Sequence[Repair]) -> list[DumpedRollout]:
        """The rollouts after these repairs."""
        names = tuple(repair.name for repair in repairs)
        if names not in self._repaired:
            rollouts = list(self.rollouts)
            for repair in repairs:
                rollouts = [repair.apply(rollout) for rollout in rollouts]
            self._repaired[names] = rollouts
        return self._repaired[names]

    def scores(self, assumption: Assumption, question: Question | None = None) -> list[Scored]:
        """By rollout; `kept` and `factor` are not looked at."""
        asked = self.question if question is None else question
        names = tuple(repair.name for repair in assumption.repairs)
        key = (assumption.routing, assumption.weights, names, asked)
        if key not in self._scored:
            rollouts = self.repaired(assumption.repairs)
            if assumption.routing == "own":
                rollouts = [replace(rollout, expert_ids=None, routed=None) for rollout in rollouts]
            self._scored[key] = self._by_scorer(rollouts, assumption.weights, asked)
        return self._scored[key]

    def differences(self, assumption: Assumption) -> Differences:
        """d of every sampled token."""
        question = self.question
        if isinstance(assumption.kept, float):
            question = replace(question, top_ps=(assumption.kept,))
        if assumption.factor != 1.0:
            question = replace(question, factors=(assumption.factor,))
        parts: list[NDArray[np.float64]] = []
        for scored in self.scores(assumption, question):
            if assumption.kept == "listed":
                parts.append(scored.kept_TF[:, 0])
            else:
                parts.append(scored.full_TF[:, 0] if assumption.kept == "full" else scored.rebuilt_TP[:, 0])
        return Differences(np.concatenate(parts) - self.rollout_logprobs, self.starts)

    def gap(self, assumption: Assumption) -> float:
        """Mean |d|, nats."""
        return self.differences(assumption).mean

    def _by_scorer(self, rollouts: Sequence[DumpedRollout], weights: int | None, question: Question) -> list[Scored]:
        chosen = [self.scorer_of(rollout) if weights is None else weights for rollout in rollouts]
        scored: dict[int, Scored] = {}
        for number in sorted(set(chosen)):
            of_it = [i for i, each in enumerate(chosen) if each == number]
            scored |= zip(of_it, self.scorers[number].score([rollouts[i] for i in of_it], question), strict=True)
        return [scored[i] for i in range(len(rollouts))]

    def scorer_of(self, rollout: DumpedRollout) -> int:
        """The number of the scorer whose version sampled the last token, else the first one."""
        version = int(rollout.policy_versions.max())
        return next((i for i, scorer in enumerate(self.scorers) if scorer.version == version), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Bootstrap:
    """Resampled rollouts, the same ones for every quantity, so that intervals of parts and their sum fit together.

    counts_BR: float64, how often a rollout is in a sample. starts: of the tokens of rollouts.
    """

    counts_BR: NDArray[np.float64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, starts: NDArray[np.int64], seed: int = 0) -> Bootstrap:
        num = len(starts) - 1
        rng = np.random.default_rng(seed)
        return cls(rng.multinomial(num, np.full(num, 1.0 / num), RESAMPLES).astype(np.float64), starts)

    def mean(self, values_N: NDArray[np.float64]) -> Interval:
        """Of a quantity of every token."""
        sums_R = np.add.reduceat(values_N, self.starts[:-1])
        totals_B = self.counts_BR @ sums_R
        means_B = totals_B / (self.counts_BR @ np.diff(self.starts))
        low, high = np.quantile(means_B, [0.025, 0.975])
        value = float(values_N.mean())
        return Interval(value, min(float(low), value), max(float(high), value))
