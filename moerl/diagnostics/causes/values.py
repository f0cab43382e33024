"""Faults of everything but the record of routes: tokens, weights, temperature, what log-probs were taken over.

Each is a change of the assumption under which rollouts are scored. The change that closes most of the gap is accepted
and the search goes on from there, until none closes a clear part of it. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moerl.diagnostics.causes.gaps import Assumption, Bootstrap, Gaps, Repair
from moerl.diagnostics.report.data import Evidence
from moerl.diagnostics.scoring import Question

CLEAR_PART = 0.3
"""Of the gap, that a change must close."""
OVER_FLOOR = 3.0
"""Times the floor, that it must close."""
COARSE = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.11, 1.25, 1.43, 1.67, 2.0)
"""Temperature factors of the first look."""
SAME_FACTOR = 0.03
"""A factor within this of 1 is no other temperature."""
TOP_PS = (0.7, 0.8, 0.9, 0.95, 0.98)
"""Values of top-p that unlisted sets are looked for with."""

Change = Callable[[Assumption], Assumption]


@dataclass(frozen=True, slots=True, eq=False)
class ValueFault:
    """cause: key of `moerl.diagnostics.causes.texts`. change: takes the fault back."""

    cause: str
    title: str
    evidence: tuple[Evidence, ...]
    change: Change


@dataclass(frozen=True, slots=True)
class Search:
    """floor: nats that rounding alone makes. edits: repairs of tokens to try, with what each says is wrong."""

    gaps: Gaps
    bootstrap: Bootstrap
    floor: float
    edits: Sequence[tuple[Repair, str]] = ()

    def tokens_and_weights(self, start: Assumption) -> list[ValueFault]:
        """Prompts that are not those of the engine, weights that are not those of the version."""
        return self._greedy(start, lambda now: [*self._edits(), *self._weights(now)])

    def distributions(self, start: Assumption) -> list[ValueFault]:
        """Temperatures and kept sets that are not as said."""
        return self._greedy(start, lambda now: [*self._temperature(now), *self._supports(now)])

    def _greedy(self, start: Assumption, candidates: Callable[[Assumption], list[ValueFault]]) -> list[ValueFault]:
        now, found = start, list[ValueFault]()
        while True:
            taken = {fault.cause for fault in found}
            closed = [
                (closes, fault)
                for fault in candidates(now)
                if fault.cause not in taken and (closes := self.closes(now, fault.change(now))) > 0
            ]
            if not closed:
                return found
            _, fault = max(closed, key=lambda pair: pair[0])
            found.append(fault)
            now = fault.change(now)

    def closes(self, before: Assumption, after: Assumption) -> float:
        """Nats by which the gap shrinks; 0 where that is not a clear part of it."""
        one, other = self.gaps.differences(before), self.gaps.differences(after)
        closed = self.bootstrap.mean(one.sizes - other.sizes)
        is_clear = closed.low > 0 and closed.value > max(CLEAR_PART * one.mean, OVER_FLOOR * self.floor)
        return closed.value if is_clear else 0.0

    def _edits(self) -> Iterator[ValueFault]:
        for repair, title in self.edits:
            yield ValueFault("template", title, (), lambda now, repair=repair: now.with_repair(repair))

    def _weights(self, now: Assumption) -> Iterator[ValueFault]:
        scorers = self.gaps.scorers
        if len(scorers) < 2 or now.weights is not None:
            return
        said = {self.gaps.scorer_of(rollout) for rollout in self.gaps.rollouts}
        for number, scorer in enumerate(scorers):
            if said == {number}:
                continue
            evidence = tuple(
                Evidence(f"mean |d| with {each.name}", f"{self.gaps.gap(replace(now, weights=i)):.2e} nats")
                for i, each in enumerate(scorers)
            )
            title = f"the engine sampled with the weights of {scorer.name}, not with those that the dump says"
            yield ValueFault("stale_weights", title, evidence, lambda now, number=number: replace(now, weights=number))

    def _temperature(self, now: Assumption) -> Iterator[ValueFault]:
        if now.factor != 1.0:
            return
        factor = self._fit(now, COARSE)
        place = COARSE.index(factor)
        low, high = COARSE[max(0, place - 1)], COARSE[min(len(COARSE) - 1, place + 1)]
        factor = self._fit(now, tuple(np.round(np.linspace(low, high, 17), 4).tolist()))
        # At an edge of the grid the log-probs fit no temperature: something else is wrong.
        if abs(factor - 1.0) <= SAME_FACTOR or factor in (COARSE[0], COARSE[-1]):
            return
        said = np.concatenate([rollout.temperatures[rollout.sampled] for rollout in self.gaps.rollouts])
        median = float(np.median(said))
        evidence = (
            Evidence("temperature at which the model's log-probs fit best", f"{median * factor:.2f}", f"{median:g}"),
            Evidence("mean |d| at the temperature said", f"{self.gaps.gap(now):.2e} nats"),
            Evidence("mean |d| at the one that fits", f"{self.gaps.gap(replace(now, factor=factor)):.2e} nats"),
        )
        title = f"tokens were drawn at temperature {median * factor:.2f}, and {median:g} is said or assumed"
        if abs(median * factor - 1.0) <= SAME_FACTOR:
            title = f"log-probs are those before the temperature of {median:g} was applied"
        yield ValueFault("temperature", title, evidence, lambda now: replace(now, factor=factor))

    def _fit(self, now: Assumption, factors: tuple[float, ...]) -> float:
        """The factor with the smallest mean |d|."""
        scored = self.gaps.scores(now, Question(factors=factors))
        which = "kept_TF" if now.kept == "listed" else "full_TF"
        logprobs_NF = np.concatenate([getattr(each, which) for each in scored])
        gaps_F = np.abs(logprobs_NF - self.gaps.rollout_logprobs[:, None]).mean(0)
        return factors[int(gaps_F.argmin())]

    def _supports(self, now: Assumption) -> Iterator[ValueFault]:
        if now.kept == "listed":
            yield ValueFault(
                "full_logprobs",
                "log-probs are over the full vocabulary, though kept sets are listed",
                (
                    Evidence("mean |d| inside of the kept sets", f"{self.gaps.gap(now):.2e} nats"),
                    Evidence("over the vocabulary", f"{self.gaps.gap(replace(now, kept='full')):.2e} nats"),
                ),
                lambda now: replace(now, kept="full"),
            )
        has_sets = any(rollout.kept is not None for rollout in self.gaps.rollouts)
        if now.kept != "full" or has_sets or not self.gaps.scorers[0].offers_top_ps:
            return
        for top_p in TOP_PS:
            evidence = (
                Evidence("mean |d| over the vocabulary", f"{self.gaps.gap(now):.2e} nats"),
                Evidence(f"inside of sets of top-p {top_p:g}", f"{self.gaps.gap(replace(now, kept=top_p)):.2e} nats"),
            )
            yield ValueFault(
                "hidden_masks",
                f"tokens were drawn with a filter such as top-p {top_p:g}, and the dump has no kept sets",
                evidence,
                lambda now, top_p=top_p: replace(now, kept=top_p),
            )


def oversized_sets(gaps: Gaps, assumption: Assumption) -> tuple[float, float] | None:
    """Where kept sets are larger than the top-p of the dump needs: the median mass that all but their least likely
    member hold, and the top-p said. None where they are not, or where none are listed.

    A top-p set is the smallest that holds top-p: without its least likely member it holds less.
    """
    more, said = list[np.ndarray](), list[np.ndarray]()
    for rollout, scored in zip(gaps.repaired(assumption.repairs), gaps.scores(assumption), strict=True):
        if rollout.kept is None or scored.least_T is None:
            continue
        several = rollout.kept.sizes[rollout.sampled] > 1
        more.append((scored.mass_T - scored.least_T)[several])
        said.append(rollout.top_ps[rollout.sampled][several].astype(np.float64))
    if not more or not sum(map(len, more)):
        return None
    inner, top_p = np.concatenate(more), np.concatenate(said)
    cuts = top_p < 1.0
    if cuts.sum() < 32 or np.median((inner - top_p)[cuts]) < 0.02:
        return None
    return float(np.median(inner[cuts])), float(np.median(top_p[cuts]))
