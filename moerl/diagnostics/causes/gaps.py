"""Gaps of dumped rollouts under assumptions: how far their log-probs are from a model's, if it scores them so.

An assumption is a way to score one rollout: with which experts, inside of which kept sets, at which temperature and
weights, after which repairs of the dump. A plan has one for each rollout, since a fault may be in some of them alone.
Causes are found by comparing gaps. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.routes import enforceable
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Interval
from moerl.diagnostics.scoring import Question, RolloutScorer, Scored
from moerl.errors import EngineError

RESAMPLES = 400
"""Bootstrap samples of rollouts behind every interval."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A change of rollouts that takes a fault back."""

    name: str
    """Unique among repairs: scores are kept by it."""
    apply: Callable[[DumpedRollout], DumpedRollout]
    """Pure; keeps the number of sampled tokens. A log-prob that it makes NaN is not looked at."""
    of: Literal["tokens", "sets", "log-probs", "routes"] = "tokens"
    """The only part that it changes. A repair of "routes" contains every such repair before it."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """A way to score a rollout."""

    routing: Literal["own", "recorded"] = "own"
    """Experts of the (repaired) dump, filled up with the model's own, if "recorded"; the model's own if "own"."""
    kept: Literal["listed", "full"] | float = "full"
    """Support: its kept sets if "listed", the vocabulary if "full", or sets that a top-p filter of this value would
    have kept."""
    factor: float = 1.0
    """Times the temperatures of the dump."""
    weights: int | None = None
    """Number of the scorer; None: the one whose version the dump names."""
    repairs: tuple[Repair, ...] = ()
    """In order; at most one of "routes", the last."""

    def with_repair(self, repair: Repair) -> Assumption:
        routes = [each for each in self.repairs if each.of == "routes"]
        others = [each for each in self.repairs if each.of != "routes"]
        return replace(self, repairs=(*others, repair) if repair.of == "routes" else (*others, repair, *routes))


Plan = Sequence[Assumption]
"""One assumption for each rollout."""
Change = Callable[[Assumption], Assumption]
_PLAIN = Question()


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """Differences d = model's log-prob less the rollout's, of every sampled token, rollout after rollout."""

    d_N: NDArray[np.float64]
    """float64, nats; 0 for a token whose log-prob a repair made NaN."""
    starts: NDArray[np.int64]
    """int64 [rollouts + 1]: rollout r has the tokens from starts[r] to starts[r + 1]."""

    @property
    def sizes(self) -> NDArray[np.float64]:
        return np.abs(self.d_N)

    @property
    def mean(self) -> float:
        """Mean |d|."""
        return float(self.sizes.mean())

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean |d| of each rollout."""
        return np.add.reduceat(self.sizes, self.starts[:-1]) / np.diff(self.starts)


@dataclass(slots=True)
class Gaps:
    """Scores of rollouts under assumptions; each combination of experts, repairs, weights and question is scored
    once."""

    rollouts: Sequence[DumpedRollout]
    """Rollouts as the dump has them; at least one."""
    scorers: Sequence[RolloutScorer]
    """At least one. A rollout is scored by the one whose version it names, unless its assumption says another."""
    _scored: dict[tuple[object, ...], Scored] = field(default_factory=dict)
    _repaired: dict[tuple[object, ...], DumpedRollout] = field(default_factory=dict)

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(rollout.num_sampled for rollout in self.rollouts)])

    def repaired(self, plan: Plan) -> list[DumpedRollout]:
        """Returns the rollouts after the repairs of the plan."""
        return [self._repair(number, assumption.repairs) for number, assumption in enumerate(plan)]

    def scores(self, plan: Plan, question: Question = _PLAIN) -> list[Scored]:
        """Returns the scores by rollout; `kept` and `factor` of the plan are ignored."""
        return self._some(range(len(plan)), plan, question)

    def as_planned(self, plan: Plan) -> list[Scored]:
        """Returns the scores by rollout; their first factor and first top-p are those of the plan."""
        asked = [Question((each.factor,), (each.kept,) if isinstance(each.kept, float) else ()) for each in plan]
        scored: dict[int, Scored] = {}
        for question in dict.fromkeys(asked):
            chosen = [number for number, each in enumerate(asked) if each == question]
            scored |= zip(chosen, self._some(chosen, plan, question), strict=True)
        return [scored[number] for number in range(len(plan))]

    def logprobs(self, plan: Plan) -> list[NDArray[np.float64]]:
        """Returns the model's log-probs of the sampled tokens by rollout, float64, nats."""
        return [
            {"listed": score.kept_TF, "full": score.full_TF}.get(str(each.kept), score.rebuilt_TP)[:, 0]
            for each, score in zip(plan, self.as_planned(plan), strict=True)
        ]

    def differences(self, plan: Plan) -> Differences:
        """Returns d of every sampled token."""
        parts: list[NDArray[np.float64]] = []
        for logprobs_T, rollout in zip(self.logprobs(plan), self.repaired(plan), strict=True):
            said_T = rollout.rollout_logprobs[rollout.sampled].astype(np.float64)
            parts.append(np.where(np.isnan(said_T), 0.0, logprobs_T - said_T))
        return Differences(np.concatenate(parts), self.starts)

    def means_by_factor(self, plan: Plan, factors: tuple[float, ...]) -> NDArray[np.float64]:
        """Returns mean |d| of each rollout at each of these factors of its temperatures: float64 [factors, rollouts].
        `factor` of the plan is ignored."""
        means: list[NDArray[np.float64]] = []
        scores = self.scores(plan, Question(factors=factors))
        for assumption, scored, rollout in zip(plan, scores, self.repaired(plan), strict=True):
            logprobs_TF = scored.kept_TF if assumption.kept == "listed" else scored.full_TF
            d_TF = logprobs_TF - rollout.rollout_logprobs[rollout.sampled].astype(np.float64)[:, None]
            means.append(np.abs(np.nan_to_num(d_TF)).mean(0))
        return np.stack(means, 1)

    def own_ids(self, plan: Plan) -> list[NDArray[np.int16]]:
        """Returns what the model's routers choose by themselves, [S - 1, L, K] by rollout."""
        return [scored.own_ids for scored in self.scores([replace(each, routing="own") for each in plan])]

    def scorer_of(self, rollout: DumpedRollout) -> int:
        """Returns the number of the scorer that has the newest policy version of the rollout, else 0."""
        version = int(rollout.policy_versions.max())
        return next((i for i, scorer in enumerate(self.scorers) if scorer.version == version), 0)

    def _some(self, numbers: Sequence[int], plan: Plan, question: Question) -> list[Scored]:
        keys = [self._key(number, plan[number], question) for number in numbers]
        missing = [number for number, key in zip(numbers, keys, strict=True) if key not in self._scored]
        if missing:
            found = self._score(missing, plan, question)
            self._scored |= zip((self._key(i, plan[i], question) for i in missing), found, strict=True)
        return [self._scored[key] for key in keys]

    def _key(self, number: int, assumption: Assumption, question: Question) -> tuple[object, ...]:
        seen = ("tokens", "sets", "routes") if assumption.routing == "recorded" else ("tokens", "sets")
        names = tuple(repair.name for repair in assumption.repairs if repair.of in seen)
        return number, assumption.routing, self._weights(number, assumption), names, question

    def _weights(self, number: int, assumption: Assumption) -> int:
        """Returns the number of the scorer."""
        return self.scorer_of(self.rollouts[number]) if assumption.weights is None else assumption.weights

    def _repair(self, number: int, repairs: Iterable[Repair]) -> DumpedRollout:
        rollout, names = self.rollouts[number], list[str]()
        for repair in repairs:
            names.append(repair.name)
            key = (number, *names)
            if key not in self._repaired:
                self._repaired[key] = repair.apply(rollout)
            rollout = self._repaired[key]
        return rollout

    def _score(self, numbers: Sequence[int], plan: Plan, question: Question) -> list[Scored]:
        rollouts = [self._repair(number, plan[number].repairs) for number in numbers]
        recorded = [
            place
            for place, number in enumerate(numbers)
            if plan[number].routing == "recorded" and rollouts[place].expert_ids is not None
        ]
        own_plan = [replace(assumption, routing="own") for assumption in plan]
        own = self._some([numbers[place] for place in recorded], own_plan, _PLAIN) if recorded else []
        whole = {
            place: enforceable(rollouts[place], each.own_ids, self.scorers[0].spec.num_experts)
            for place, each in zip(recorded, own, strict=True)
        }
        chosen = [whole.get(i) or replace(each, expert_ids=None, routed=None) for i, each in enumerate(rollouts)]
        by_scorer: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            by_scorer.setdefault(self._weights(number, plan[number]), []).append(place)
        scored: dict[int, Scored] = {}
        for scorer, places in sorted(by_scorer.items()):
            scored |= zip(places, self.scorers[scorer].score([chosen[i] for i in places], question), strict=True)
        for place, score in scored.items():
            if not (np.isfinite(score.full_TF).all() and np.isfinite(score.kept_TF).all()):
                raise EngineError(
                    "--model: log-probs that are not finite",
                    seen=f"rollout {rollouts[place].name}",
                    expected="finite log-probs of all sampled tokens",
                    remedy="look for NaN in the weights, or score in another --dtype",
                )
        return [scored[place] for place in range(len(numbers))]


@dataclass(frozen=True, slots=True, eq=False)
class Bootstrap:
    """Resampled rollouts, the same ones for every quantity, so that intervals of parts and their sum fit together."""

    counts_BR: NDArray[np.float64]
    """How often each rollout is in each of B = `RESAMPLES` samples."""
    starts: NDArray[np.int64]
    """int64 [rollouts + 1], as in `Differences`."""

    @classmethod
    def of(cls, starts: NDArray[np.int64], seed: int = 0) -> Bootstrap:
        num = len(starts) - 1
        rng = np.random.default_rng(seed)
        return cls(rng.multinomial(num, np.full(num, 1.0 / num), RESAMPLES).astype(np.float64), starts)

    def mean(self, values_N: NDArray[np.float64], of_R: NDArray[np.bool_] | None = None) -> Interval:
        """Returns the mean of a quantity over all tokens, or over those of some rollouts, at least one, with its 95 %
        interval."""
        sums_R = np.add.reduceat(values_N, self.starts[:-1])
        counts_R = np.diff(self.starts).astype(np.float64)
        if of_R is not None:
            sums_R, counts_R = np.where(of_R, sums_R, 0.0), np.where(of_R, counts_R, 0.0)
        counts_B = self.counts_BR @ counts_R
        means_B = (self.counts_BR @ sums_R)[counts_B > 0] / counts_B[counts_B > 0]
        low, high = np.quantile(means_B, [0.025, 0.975])
        value = float(sums_R.sum() / counts_R.sum())
        return Interval(value, min(float(low), value), max(float(high), value))
