"""The causes of a dump's gap, each with its size and its rollouts, and the gap as a sum of parts. Torch-free.

Order of the search: kept sets (by tokens, and by the model's log-probs), prompt tokens, log-probs and weights with the
model's own routing, the record against that routing, then temperature and supports with everything enforced; once more
if that left rollouts odd; then the causes that set tokens apart. A fault may be in all rollouts or in some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.accounts import Accounts
from moerl.diagnostics.causes.apart import ROUNDING, Apart, odd_rollouts, tokens_apart
from moerl.diagnostics.causes.faults import CLEAN, MOST_FLOOR, Fault, Ground, changed
from moerl.diagnostics.causes.gaps import Assumption, Bootstrap, Differences, Gaps, Repair
from moerl.diagnostics.causes.masks import mask_faults
from moerl.diagnostics.causes.records import Records, search_records
from moerl.diagnostics.causes.texts import CAUSES
from moerl.diagnostics.causes.values import Search, oversized_sets
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Confidence, Decomposition, Evidence, Finding, Interval
from moerl.diagnostics.scoring import Question, RolloutScorer, Scored

FLOOR_ROLLOUTS = 16
"""Rollouts that the floor is measured on."""
MAX_NAMED = 8
"""Rollouts of a finding whose names are printed, at most."""
LEAST_FLOOR = 1e-6
"""Nats; a dump stores log-probs in float32."""
ROUNDS = 2
"""Searches one after the other: a fault of values may hide one of the record, and the other way round."""


@dataclass(frozen=True, slots=True, eq=False)
class Diagnosis:
    """Causes of a gap."""

    gaps: Gaps
    """All rollouts and their scores."""
    final: list[Assumption]
    """The plan under which the least is left."""
    as_recorded: list[Assumption]
    """The plan of the dump as it came."""
    floor: float
    """Nats that rounding makes in the mean of the rollouts."""
    own_floor: float
    """The same if each side has the experts of its own routers."""
    residual: Differences
    """Differences under `final`."""
    decompositions: tuple[Decomposition, ...]
    """Sums of parts: nothing kept, then as recorded."""
    findings: tuple[Finding, ...]
    """Findings with a cause by size; then top-p, the unexplained rest and odd rollouts."""
    faults: tuple[Fault, ...]
    """Faults with the rollouts that have them."""
    route_agreement: tuple[float, float] | None
    """Mean Jaccard of the record, as `Records.agreement`; None without routes."""


def diagnose(
    rollouts: Sequence[DumpedRollout],
    scorers: Sequence[RolloutScorer],
    floor_scorer: RolloutScorer,
    edits: Sequence[tuple[Repair, str]] = (),
    *,
    half: RolloutScorer | None = None,
) -> Diagnosis:
    """Finds the causes of the gap of these rollouts.

    Args:
        rollouts: at least one, with distinct names. scorers: at least one; several for several policy versions.
        floor_scorer: the weights of the first scorer in a finer arithmetic.
        edits: repairs of the tokens of prompts to try, each with the title of its fault.
        half: these weights in 16 bits, if the scorers compute in more: an engine may compute in 16 bits.
    """
    gaps = Gaps(rollouts, scorers)
    some = rollouts[:FLOOR_ROLLOUTS]
    fine, own_fine = measure_floor(some, scorers[0], floor_scorer)
    coarse = (fine, own_fine) if half is None else measure_floor(some, half, scorers[0])
    rounding, own_rounding = max(fine, coarse[0]), max(own_fine, coarse[1])
    ground = Ground(gaps, Bootstrap.of(gaps.starts), rounding, own_rounding)
    masks = mask_faults(ground)
    inputs, values, records = _search(ground, Search(ground, edits), masks)
    residual = gaps.differences(records.plan)
    level_R = ground.floors
    for fault in records.faults:
        if fault.cause == "foreign_routes":
            level_R[fault.of_R] = max(own_rounding, records.own_level)
    version = scorers[0].version if len(scorers) == 1 else None
    groups = tokens_apart(rollouts, residual, float(ground.floors.mean()), version)
    accounts = Accounts(ground, records.plan, level_R, groups)
    nothing = accounts.nothing_kept([*inputs, *values], masks)
    prompts = [fault for fault in inputs if fault.cause == "template"]
    others = [*masks, *(fault for fault in inputs if fault.cause != "template"), *values]
    recorded, parts = accounts.as_recorded(prompts, records.faults, others)
    faults = [*prompts, *records.faults, *others]
    odd_R = odd_rollouts(residual, level_R, groups)
    told = _Told(ground, recorded, residual, level_R, odd_R if 2 * odd_R.sum() <= len(odd_R) else odd_R & False)
    findings = [*told.faults(faults, parts), *told.groups(groups)]
    findings = sorted(findings, key=lambda finding: -finding.nats.value)
    findings += told.top_p(oversized_sets(gaps, records.plan)) + told.rest(fine, own_fine) + told.odd()
    return Diagnosis(
        gaps,
        records.plan,
        accounts.raw(),
        float(ground.floors.mean()),
        own_rounding,
        residual,
        (nothing, recorded),
        tuple(findings),
        tuple(faults),
        records.agreement,
    )


def _search(ground: Ground, search: Search, masks: Sequence[Fault]) -> tuple[list[Fault], list[Fault], Records]:
    """Returns faults of inputs, faults of distributions, and the record with all of them put right."""
    start = [Assumption(kept="full" if rollout.kept is None else "listed") for rollout in ground.rollouts]
    inputs, values, records = list[Fault](), list[Fault](), Records(start)
    for _ in range(ROUNDS):
        more_inputs = search.inputs(changed(start, [*masks, *inputs, *values]))
        inputs += more_inputs
        records = search_records(ground, changed(start, [*masks, *inputs, *values]))
        more_values = search.distributions(records.plan)
        values += more_values
        records.plan = changed(records.plan, more_values)
        found = [*more_inputs, *records.faults, *more_values]
        if not found or not ground.odd(ground.gaps.differences(records.plan).means).any():
            break
    return inputs, values, records


def measure_floor(
    rollouts: Sequence[DumpedRollout], scorer: RolloutScorer, finer: RolloutScorer
) -> tuple[float, float]:
    """Returns the mean |difference| of log-probs of one model in two arithmetics, nats: with the same experts, and with
    those that its routers choose in each; `LEAST_FLOOR` at least, and the second not less than the first."""
    plain = [replace(rollout, expert_ids=None, routed=None, kept=None) for rollout in rollouts]
    own = scorer.score(plain, Question())
    same = [replace(r, expert_ids=s.own_ids.astype(np.int32)) for r, s in zip(plain, own, strict=True)]
    with_same = _mean_difference(scorer.score(same, Question()), finer.score(same, Question()))
    return with_same, max(with_same, _mean_difference(own, finer.score(plain, Question())))


def _mean_difference(one: Sequence[Scored], other: Sequence[Scored]) -> float:
    parts = [np.abs(a.full_TF - b.full_TF)[:, 0] for a, b in zip(one, other, strict=True)]
    return max(LEAST_FLOOR, float(np.concatenate(parts).mean()))


_NOTES = ("staleness", "unexplained", "precision", "temperature_unsaid")
"""Causes whose findings are notes: somebody may want them."""
_WHAT = {
    "bad_engine": ("engine {} does not sample as the others do", "mean |d| of engine {}"),
    "staleness": (
        "tokens of age {} (versions) were sampled by weights that were not given",
        "mean |d| of tokens of age {}",
    ),
    "turn_apart": ("tokens of turn {} are not scored as those of other turns", "mean |d| of turn {}"),
    "depth_apart": ("tokens {} deep in their context are apart from the others", "mean |d| at a depth of {}"),
}
"""Titles and evidence of tokens that are apart, by cause."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Findings on faults, on tokens that are apart, and on the gap that is left.

    level_R: nats of each rollout that are no fault. odd_R: rollouts that are odd by themselves, if most are not.
    """

    ground: Ground
    recorded: Decomposition
    residual: Differences
    level_R: NDArray[np.float64]
    odd_R: NDArray[np.bool_]

    @property
    def nats(self) -> dict[str, Interval]:
        """Parts of the gap as recorded, by cause."""
        return {share.cause: share.nats for share in self.recorded.shares}

    def faults(self, faults: Sequence[Fault], parts: Sequence[Interval]) -> list[Finding]:
        """Returns every fault with its rollouts, and with what it costs if the dump is used as it came. Faults of one
        title are one.

        A fault is certain if kept sets do not hold their token, or if what is left of its rollouts after all repairs
        is rounding and the lower end of its interval is more than half of its size.
        """
        by_title: dict[tuple[str, str], list[int]] = {}
        for number, fault in enumerate(faults):
            by_title.setdefault((fault.cause, fault.title), []).append(number)
        return [self._fault([faults[i] for i in those], [parts[i] for i in those]) for those in by_title.values()]

    def _fault(self, faults: Sequence[Fault], parts: Sequence[Interval]) -> Finding:
        fault, of_R = faults[0], np.any([each.of_R for each in faults], axis=0)
        nats = Interval(*(sum(getattr(part, name) for part in parts) for name in ("value", "low", "high")))
        left, level = self.ground.mean_of(self.residual, of_R), float(self.level_R[of_R].mean())
        is_certain = fault.cause.startswith("mask") or (left <= CLEAN * level and nats.low > 0.5 * nats.value)
        title, names, evidence = fault.title, self._names(of_R), fault.evidence
        if fault.cause == "temperature" and of_R.all() and not any(r.says_temperature for r in self.ground.rollouts):
            return self._finding("temperature_unsaid", "certain" if is_certain else "likely", title, nats, evidence)
        if names:
            title += f", in {len(names)} of {len(of_R)} rollouts"
            evidence = (*evidence, self._whose(of_R, names))
        return self._finding(fault.cause, "certain" if is_certain else "likely", title, nats, evidence, names)

    def groups(self, groups: Sequence[Apart]) -> list[Finding]:
        """Returns a finding for each cause of tokens that are apart."""
        found: list[Finding] = []
        for cause in dict.fromkeys(group.cause for group in groups):
            of_it = [group for group in groups if group.cause == cause]
            title, seen = _WHAT[cause]
            names = ", ".join(repr(group.name) if cause == "bad_engine" else group.name for group in of_it)
            evidence = tuple(
                Evidence(seen.format(repr(each.name)), f"{each.mean:.2e} nats", f"{each.others:.2e} (others)")
                for each in of_it
            )
            nats = self.nats[cause]
            is_closed = self.rounding_times() < CLEAN and nats.low > 0.5 * nats.value
            confidence: Confidence = "certain" if is_closed else "likely"
            if cause == "staleness":  # nothing but their age speaks for it
                confidence = "possible"
            found.append(self._finding(cause, confidence, title.format(names), nats, evidence))
        return found

    def top_p(self, larger: tuple[float, float] | None) -> list[Finding]:
        """Returns a finding on sets that are larger than their top-p makes them. larger: as of `oversized_sets`."""
        if larger is None:
            return []
        mass, said = larger
        seen = Evidence("mass of a kept set without its least likely member, median", f"{mass:.3f}", f"< {said:g}")
        title = f"kept sets are larger than top-p {said:g} makes them"
        return [self._finding("top_p", "likely", title, Interval(0.0, 0.0, 0.0), (seen,))]

    def rounding_times(self) -> float:
        """Returns the gap that is left and not taken apart, in times of the level that is no fault; odd rollouts do not
        count."""
        left = self.nats["unexplained"].value + self.nats["precision"].value
        counts = np.diff(self.residual.starts)
        if self.odd_R.any():
            sums_R = self.residual.means * counts
            left = float((left * counts.sum() - sums_R[self.odd_R].sum()) / counts[~self.odd_R].sum())
        level = float((self.level_R * counts)[~self.odd_R].sum() / counts[~self.odd_R].sum())
        return left / level

    def rest(self, fine: float, own_fine: float) -> list[Finding]:
        """Returns what no cause explains, if it is more than rounding; or rounding to 16 bits, if the model has more.

        fine, own_fine: nats that rounding of the model's own dtype makes, as `measure_floor` returns them.
        """
        nats_of = self.nats
        has_R = np.array([rollout.expert_ids is not None for rollout in self.ground.rollouts])
        fine = float(np.where(has_R, fine, own_fine)[~self.odd_R].mean())
        nats, most = float(self.ground.floors.max()), f"at most {MOST_FLOOR:g}"
        if nats > MOST_FLOOR:
            without = "" if nats == self.ground.floor else ", if each side chooses its experts"
            title = f"this arithmetic alone makes {nats:.1e} nats{without}, too much to see anything else"
            seen = Evidence("mean difference to a finer arithmetic, nats", f"{nats:.2e}", most)
            return [self._finding("unexplained", "certain", title, nats_of["precision"], (seen,))]
        times, level = self.rounding_times(), float(self.level_R[~self.odd_R].mean())
        left = self.ground.bootstrap.mean(self.residual.sizes, ~self.odd_R)
        expected = f"under {CLEAN * level:.1e} ({CLEAN:g} times rounding)"
        seen = Evidence("mean |d| with everything kept and repaired", f"{times * level:.2e} nats", expected)
        if times >= ROUNDING and left.low > ROUNDING * level:
            biased = Evidence("mean d", f"{self.residual.d_N.mean():+.2e} nats", "0")
            title = "the engine's weights or arithmetic are not the model's"
            return [self._finding("weights", "likely", title, nats_of["unexplained"], (seen, biased))]
        if times >= CLEAN:
            title = f"{times * level:.1e} nats are unexplained, {times:.1f} times rounding"
            return [self._finding("unexplained", "possible", title, nats_of["unexplained"], (seen,))]
        if level <= fine or left.value <= ROUNDING * fine:
            return []
        seen = Evidence("mean |d| left", f"{left.value:.2e} nats", f"{level:.1e} (16 bits), {fine:.1e} (model)")
        title = "the engine rounds to 16 bits, the model does not"
        return [self._finding("precision", "likely", title, nats_of["precision"], (seen,))]

    def odd(self) -> list[Finding]:
        """Returns a finding on the rollouts that are odd: a mean over all may hide them."""
        if not self.odd_R.any():
            return []
        counts = np.diff(self.residual.starts)
        mean, level = self.ground.mean_of(self.residual, self.odd_R), float(self.level_R[self.odd_R].mean())
        nats = float(mean * counts[self.odd_R].sum() / counts.sum())
        names = self._names(self.odd_R)
        count = f"{len(names)} of {len(self.odd_R)} rollouts"
        are, them = ("is", "it") if len(names) == 1 else ("are", "them")
        title = f"{count} {are} {mean / level:.0f} times rounding apart, and nothing explains {them}"
        seen = Evidence("their mean |d|", f"{mean:.2e} nats", f"{level:.1e} (rounding)")
        evidence = (seen, self._whose(self.odd_R, names))
        return [self._finding("unexplained", "likely", title, Interval(nats, nats, nats), evidence, names)]

    def _finding(
        self,
        cause: str,
        confidence: Confidence,
        title: str,
        nats: Interval,
        evidence: tuple[Evidence, ...],
        names: tuple[str, ...] = (),
    ) -> Finding:
        level = "note" if cause in _NOTES else "fault"
        part = min(1.0, max(0.0, nats.value / max(self.recorded.total.value, 1e-12)))
        return Finding(cause, level, confidence, title, CAUSES[cause].remedy, nats, part, evidence, names)

    def _names(self, of_R: NDArray[np.bool_]) -> tuple[str, ...]:
        """Returns the names of these rollouts; none if they are all."""
        if of_R.all():
            return ()
        return tuple(self.ground.rollouts[i].name for i in np.flatnonzero(of_R).tolist())

    def _whose(self, of_R: NDArray[np.bool_], names: Sequence[str]) -> Evidence:
        """Returns the names of rollouts, and the engine, policy version or group that has just these, as evidence."""
        said = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
        rollouts = self.ground.rollouts
        for what, values in (
            ("engine", [rollout.engine for rollout in rollouts]),
            ("policy version", [str(rollout.policy_versions.max()) for rollout in rollouts]),
            ("group", [rollout.group for rollout in rollouts]),
        ):
            inside = {value for value, has in zip(values, of_R, strict=True) if has}
            outside = {value for value, has in zip(values, of_R, strict=True) if not has}
            if len(inside) == 1 and not inside & outside and inside != {""}:
                return Evidence("rollouts", f"those of {what} {inside.pop()}: {said}")
        return Evidence("rollouts", said)
