"""Faults of everything but the record of routes: tokens, log-probs, weights, temperature, supports of log-probs.

Each is a change of the assumption under which rollouts are scored. The change that closes most is accepted, for the
rollouts that it brings clearly nearer, and the search goes on from there, until none closes a clear part of any.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moerl.diagnostics.causes.faults import CLEAR_PART, COARSE, Fault, Ground, applied, repairing
from moerl.diagnostics.causes.gaps import Assumption, Gaps, Plan, Repair
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence

SAME_FACTOR = 0.03
"""A factor within this of 1 is no other temperature."""
TOP_PS = (0.7, 0.8, 0.9, 0.95, 0.98)
"""Values of top-p that are tried for sets that the dump does not list."""


@dataclass(frozen=True, slots=True)
class Search:
    """Search for the faults of values."""

    ground: Ground
    """Rollouts with their scores, and the gap that is no fault."""
    edits: Sequence[tuple[Repair, str]] = ()
    """Repairs of tokens to try, each with the title of its fault."""

    def inputs(self, start: Plan) -> list[Fault]:
        """Returns the faults of inputs: prompts that are not those of the engine, log-probs that are not of their
        tokens, weights that are not those of the version."""
        return self._greedy(start, lambda now: [*self._tokens(now), *self._logprobs(), *self._weights(now)])

    def distributions(self, start: Plan) -> list[Fault]:
        """Returns the faults of distributions: temperatures and kept sets that are not as the dump says."""
        return self._greedy(start, lambda now: [*self._temperature(now), *self._supports(now)], is_last=True)

    def _greedy(self, start: Plan, candidates: Callable[[Plan], list[Fault]], *, is_last: bool = False) -> list[Fault]:
        """Returns the faults that are there. candidates: those that may be, under a plan, with evidence beyond the
        gap before and after their change. is_last: as of `Ground.helped`."""
        now, found = list(start), list[Fault]()
        while True:
            fitting: list[tuple[float, Fault, list[Assumption]]] = []
            for candidate in candidates(now):
                may_R = candidate.of_R.copy()
                for fault in found:
                    may_R &= ~fault.of_R if fault.cause == candidate.cause else True
                of_R = may_R
                if may_R.any():
                    before, after = (applied(now, each, may_R) for each in (candidate.against, candidate.change))
                    of_R = self.ground.helped(before, after, may_R, is_last=is_last)
                if of_R.any():
                    after = applied(now, candidate.change, of_R)
                    evidence = (*candidate.evidence, self.ground.seen(of_R, now, after))
                    fault = replace(candidate, evidence=evidence, of_R=of_R)
                    left, gap = (self.ground.gaps.differences(plan).mean for plan in (after, now))
                    fitting.append((gap - left, fault, after))
            if not fitting:
                return found
            _, fault, now = max(fitting, key=lambda each: each[0])
            found.append(fault)

    def _tokens(self, now: Plan) -> Iterator[Fault]:
        for repair, title in self.edits:
            tried = np.array([any(each.name == repair.name for each in assumption.repairs) for assumption in now])
            yield Fault("template", title, (), repairing(repair), ~tried)

    def _logprobs(self) -> Iterator[Fault]:
        # A single token would have no log-prob left after the shift.
        has_two = np.array([rollout.num_sampled > 1 for rollout in self.ground.rollouts])
        for shift in (1, -1):
            title = f"log-probs are those of the token {'before' if shift > 0 else 'after'}"
            repair = Repair(f"log-probs {shift:+d}", partial(with_logprobs_of, shift=shift), "log-probs")
            fewer = Repair(f"log-probs without {shift:+d}", partial(without_end, shift=shift), "log-probs")
            yield Fault("logprob_shift", title, (), repairing(repair), has_two, against=repairing(fewer))
        zero = [rollout.sampled & (rollout.rollout_logprobs == 0) for rollout in self.ground.rollouts]
        has_R = np.array([tokens.any() for tokens in zero])
        share = sum(int(tokens.sum()) for tokens in zero) / max(1, int(self.ground.gaps.starts[-1]))
        title = (
            "tokens with log-prob 0 are not what the model expects: nobody sampled them, or their log-probs are lost"
        )
        seen = Evidence("sampled tokens with log-prob 0", f"{share:.1%}")
        repair = Repair("log-probs of 0 are none", without_zeros, "log-probs")
        yield Fault("no_logprobs", title, (seen,), repairing(repair), has_R)

    def _weights(self, now: Plan) -> Iterator[Fault]:
        gaps = self.ground.gaps
        if len(gaps.scorers) < 2:
            return
        said = np.array([gaps.scorer_of(rollout) for rollout in gaps.rollouts])
        unset = np.array([assumption.weights is None for assumption in now])
        for number, scorer in enumerate(gaps.scorers):
            title = f"the engine sampled with the weights of {scorer.name}, not with those that the dump says"
            yield Fault("stale_weights", title, (), partial(replace, weights=number), unset & (said != number))

    def _temperature(self, now: Plan) -> Iterator[Fault]:
        unset = np.array([assumption.factor == 1.0 for assumption in now])
        if not unset.any():
            return
        gaps_FR = self.ground.gaps.means_by_factor(now, COARSE)
        before_R = self.ground.gaps.differences(now).means
        gains_FR = np.where(unset, np.maximum(0.0, (1.0 - CLEAR_PART) * before_R - gaps_FR), 0.0)
        gains_FR *= self.ground.odd(before_R)
        if gains_FR.any():
            best = int(gains_FR.sum(1).argmax())
            of_it = gains_FR[best] > 0
        else:
            best, of_it = int((gaps_FR * np.diff(self.ground.gaps.starts)).sum(1).argmin()), unset
        finer = np.linspace(COARSE[max(0, best - 1)], COARSE[min(len(COARSE) - 1, best + 1)], 17)
        factors = tuple(np.round(finer, 4).tolist())
        weights_R = np.where(of_it, np.diff(self.ground.gaps.starts), 0)
        factor = factors[int((self.ground.gaps.means_by_factor(now, factors) * weights_R).sum(1).argmin())]
        # At an edge of the grid the log-probs fit no temperature: something else is wrong.
        if abs(factor - 1.0) <= SAME_FACTOR or factor in (COARSE[0], COARSE[-1]):
            return
        rollouts = [rollout for rollout, has in zip(self.ground.rollouts, of_it, strict=True) if has]
        median = float(np.median(np.concatenate([rollout.temperatures[rollout.sampled] for rollout in rollouts])))
        seen = Evidence("temperature at which the model's log-probs fit best", f"{median * factor:.2f}", f"{median:g}")
        title = f"tokens were drawn at temperature {median * factor:.2f}, and {median:g} is said or assumed"
        if abs(median * factor - 1.0) <= SAME_FACTOR:
            title = f"log-probs are those before the temperature of {median:g} was applied"
        yield Fault("temperature", title, (seen,), partial(replace, factor=factor), unset)

    def _supports(self, now: Plan) -> Iterator[Fault]:
        has_sets = np.array([rollout.kept is not None for rollout in self.ground.rollouts])
        is_listed = np.array([assumption.kept == "listed" for assumption in now])
        title = "log-probs are over the full vocabulary, though kept sets are listed"
        yield Fault("full_logprobs", title, (), partial(replace, kept="full"), has_sets & is_listed)
        if not self.ground.gaps.scorers[0].offers_top_ps:
            return
        bare = ~has_sets & np.array([assumption.kept == "full" for assumption in now])
        for top_p in TOP_PS if bare.any() else ():
            title = f"tokens were drawn with a filter such as top-p {top_p:g}, and the dump has no kept sets"
            yield Fault("hidden_masks", title, (), partial(replace, kept=top_p), bare)


def with_logprobs_of(rollout: DumpedRollout, *, shift: int) -> DumpedRollout:
    """Gives each sampled token the log-prob of the one `shift` sampled tokens later; tokens without such a one get
    NaN."""
    tokens = np.flatnonzero(rollout.sampled)
    said, moved = rollout.rollout_logprobs[tokens], np.full(len(tokens), np.nan, np.float32)
    if shift > 0:
        moved[:-shift] = said[shift:]
    else:
        moved[-shift:] = said[:shift]
    logprobs = rollout.rollout_logprobs.copy()
    logprobs[tokens] = moved
    return replace(rollout, rollout_logprobs=logprobs)


def without_end(rollout: DumpedRollout, *, shift: int) -> DumpedRollout:
    """Replaces the log-probs of sampled tokens by NaN to which `with_logprobs_of` gives none."""
    tokens = np.flatnonzero(rollout.sampled)
    logprobs = rollout.rollout_logprobs.copy()
    logprobs[tokens[-shift:] if shift > 0 else tokens[:-shift]] = np.nan
    return replace(rollout, rollout_logprobs=logprobs)


def without_zeros(rollout: DumpedRollout) -> DumpedRollout:
    """Replaces log-probs of 0 of sampled tokens by NaN."""
    zero = rollout.sampled & (rollout.rollout_logprobs == 0)
    return replace(rollout, rollout_logprobs=np.where(zero, np.float32(np.nan), rollout.rollout_logprobs))


def oversized_sets(gaps: Gaps, plan: Plan) -> tuple[float, float] | None:
    """Returns the median mass that all but the least likely member of a kept set hold, and the top-p said, if sets are
    larger than that top-p needs; None if they are not, or if none are listed.

    A top-p set is the smallest that holds top-p: without its least likely member it holds less.
    """
    more, said = list[np.ndarray](), list[np.ndarray]()
    for rollout, scored in zip(gaps.repaired(plan), gaps.as_planned(plan), strict=True):
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
