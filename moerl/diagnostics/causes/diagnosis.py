"""The causes of a dump's gap, each with its size, and the gap as a sum of parts. Torch-free.

Order of the search: kept sets by themselves (no model needed), prompt tokens and weights with the model's own routing,
routes beside that routing, then temperature and supports with everything enforced, then what sets one engine apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moerl.diagnostics.causes.accounts import (
    Accounts,
    Fault,
    changed,
    enforced,
)
from moerl.diagnostics.causes.apart import CLEAN, ROUNDING, Apart, odd_rollouts, tokens_apart
from moerl.diagnostics.causes.gaps import Assumption, Bootstrap, Differences, Gaps, Repair
from moerl.diagnostics.causes.masks import Containment, containment, shifted
from moerl.diagnostics.causes.route_faults import RouteSearch, search_routes
from moerl.diagnostics.causes.texts import CAUSES
from moerl.diagnostics.causes.values import Search, oversized_sets
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Confidence, Decomposition, Evidence, Finding, Interval
from moerl.diagnostics.scoring import Question, Scorer

FLOOR_ROLLOUTS = 16
"""Rollouts that the floor is measured on."""
MAX_NAMED = 8
"""Odd rollouts whose names are said."""
LEAST_FLOOR = 1e-6
"""Nats; a dump stores log-probs in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Diagnosis:
    """What was found. gaps: with all scores. final: the assumption under which the least is left. as_recorded: the one
    of the dump as it came. floor: nats that rounding makes. residual: d under `final`."""

    gaps: Gaps
    final: Assumption
    as_recorded: Assumption
    floor: float
    residual: Differences
    decompositions: tuple[Decomposition, ...]
    findings: tuple[Finding, ...]
    route_agreement: tuple[float, float] | None


def diagnose(
    rollouts: Sequence[DumpedRollout],
    scorers: Sequence[Scorer],
    floor_scorer: Scorer,
    edits: Sequence[tuple[Repair, str]] = (),
    *,
    half: Scorer | None = None,
) -> Diagnosis:
    """Finds the causes of the gap of these rollouts.

    Args:
        rollouts: at least one, with distinct names. scorers: at least one; several for several policy versions.
        floor_scorer: the weights of the first scorer in a finer arithmetic.
        edits: repairs of the tokens of prompts to try, each with what it says is wrong.
        half: these weights in 16 bits, where the scorers compute in more: an engine may well do so.
    """
    gaps = Gaps(rollouts, scorers)
    bootstrap = Bootstrap.of(gaps.starts)
    some = rollouts[:FLOOR_ROLLOUTS]
    floor = max(LEAST_FLOOR, measure_floor(some, scorers[0], floor_scorer))
    rounding = floor if half is None else max(floor, measure_floor(some, half, scorers[0]))
    search = Search(gaps, bootstrap, floor, edits)
    has_sets = any(rollout.kept is not None for rollout in rollouts)
    supports = "listed" if has_sets else "full"
    held = containment(rollouts)
    masks = _mask_faults(held)
    start = changed(Assumption(kept=supports), masks)
    inputs = [Fault(f.cause, f.title, f.evidence, f.change) for f in search.tokens_and_weights(start)]
    routes, route_faults = _route_faults(gaps, changed(start, inputs))
    now = enforced(changed(start, inputs), routes)
    values = [Fault(f.cause, f.title, f.evidence, f.change) for f in search.distributions(now)]
    final = changed(now, values)
    accounts = Accounts(gaps, bootstrap, rounding, supports, routes)
    residual = gaps.differences(final)
    version = scorers[0].version if len(scorers) == 1 else None
    groups = tokens_apart(rollouts, residual, rounding, version)
    nothing = accounts.nothing_kept([*inputs, *values], masks, groups)
    recorded = accounts.as_recorded([*masks, *inputs, *route_faults, *values], groups)
    odd = odd_rollouts(rollouts, residual, rounding, groups)
    rest = _rest(recorded, residual, floor, rounding) + _odd(odd, len(rollouts), recorded, rounding)
    is_closed = not any(finding.cause in ("weights", "unexplained") for finding in rest)
    findings = _findings(_with_groups([*masks, *inputs, *route_faults, *values], groups), recorded, is_closed=is_closed)
    findings += _top_p_finding(gaps, final) + rest
    return Diagnosis(
        gaps, final, accounts.raw(), rounding, residual, (nothing, recorded), tuple(findings), routes.agreement
    )


def measure_floor(rollouts: Sequence[DumpedRollout], scorer: Scorer, finer: Scorer) -> float:
    """Mean |difference| of log-probs of one model in two arithmetics, with the same experts; nats."""
    plain = [replace(rollout, expert_ids=None, routed=None, kept=None) for rollout in rollouts]
    own = scorer.score(plain, Question())
    same = [replace(r, expert_ids=s.own_ids.astype(np.int32)) for r, s in zip(plain, own, strict=True)]
    one, other = scorer.score(same, Question()), finer.score(same, Question())
    parts = [np.abs(a.full_TF - b.full_TF)[:, 0] for a, b in zip(one, other, strict=True)]
    return float(np.concatenate(parts).mean())


def _with_repair(repair: Repair, assumption: Assumption) -> Assumption:
    return assumption.with_repair(repair)


def _mask_faults(held: Containment) -> list[Fault]:
    if not held.num_outside:
        return []
    share = held.num_outside / held.num_listed
    outside = Evidence("sampled tokens that are not in their kept set", f"{share:.1%}", "0")
    if held.best_shift and 1.0 - held.best_share < share / 4:
        evidence = (
            outside,
            Evidence(f"tokens that are in the set of token t {held.best_shift:+d}", f"{held.best_share:.1%}"),
        )
        repair = Repair(f"masks {held.best_shift:+d}", partial(shifted, shift=held.best_shift))
        direction = "late" if held.best_shift > 0 else "early"
        title = f"kept sets are {abs(held.best_shift)} token{'s' if abs(held.best_shift) > 1 else ''} too {direction}"
        return [Fault("mask_shift", title, evidence, partial(_with_repair, repair))]
    title = f"{share:.1%} of the sampled tokens are not in their kept sets"
    return [Fault("mask_misses", title, (outside,), lambda assumption: assumption)]


def _route_faults(gaps: Gaps, start: Assumption) -> tuple[RouteSearch, list[Fault]]:
    """Faults of the record beside the routing of the model on the tokens as they should be."""
    rollouts = gaps.repaired(start.repairs)
    scored = gaps.scores(replace(start, routing="own"))
    own = {rollout.name: each.own_ids for rollout, each in zip(rollouts, scored, strict=True)}
    search = search_routes(rollouts, own, gaps.scorers[0].num_experts)
    faults: dict[str, Fault] = {}
    for found in search.faults:  # one for each cause; a later repair holds those before it
        before = faults.pop(found.cause, None)
        title = found.title if before is None else f"{before.title}; {found.title}"
        evidence = found.evidence if before is None else (*before.evidence, *found.evidence)
        faults[found.cause] = Fault(found.cause, title, evidence, partial(_with_repair, found.repair))
    return search, list(faults.values())


def _findings(faults: Sequence[Fault], recorded: Decomposition, *, is_closed: bool) -> list[Finding]:
    """Returns every fault with what it costs if the dump is used as it came.

    A fault is certain if it can be counted, or if what is left after all repairs is rounding (`is_closed`) and the
    lower end of its interval is at least half of its size.
    """
    parts = {share.cause: share.nats for share in recorded.shares}
    total = max(recorded.total.value, 1e-12)
    findings: list[Finding] = []
    for fault in faults:
        nats = parts[fault.cause]
        is_certain = fault.cause.startswith("mask") or (is_closed and nats.low > 0.5 * nats.value)
        confidence: Confidence = "certain" if is_certain else "likely"
        findings.append(
            Finding(
                fault.cause,
                "note" if fault.cause == "staleness" else "fault",
                confidence,
                fault.title,
                CAUSES[fault.cause].remedy,
                nats,
                _part(nats.value, total),
                fault.evidence,
            )
        )
    return sorted(findings, key=lambda finding: -finding.nats.value)


def _part(nats: float, total: float) -> float:
    return min(1.0, max(0.0, nats / total))


def _with_groups(faults: Sequence[Fault], groups: Sequence[Apart]) -> list[Fault]:
    """Faults with the tokens that are apart; an engine's joined with one about its routes."""
    joined = list(faults)
    for cause in dict.fromkeys(group.cause for group in groups):
        of_it = [group for group in groups if group.cause == cause]
        names = ", ".join(repr(group.name) if cause == "bad_engine" else group.name for group in of_it)
        what = f"engine {names}" if cause == "bad_engine" else f"tokens of age {names} (versions)"
        evidence = tuple(
            Evidence(f"mean |d| of {what}", f"{group.mean:.2e} nats", f"{group.others:.2e} (others)") for group in of_it
        )
        before = next((fault for fault in joined if fault.cause == cause), None)
        if before is not None:
            joined.remove(before)
            evidence += before.evidence
        title = f"{what} do not sample as the others do"
        if cause == "bad_engine" and len(of_it) == 1:
            title = f"{what} does not sample as the others do"
        elif cause == "staleness":
            title = f"{what}: their weights were others"
        joined.append(Fault(cause, title, evidence, lambda now: now))
    return joined


def _top_p_finding(gaps: Gaps, final: Assumption) -> list[Finding]:
    larger = oversized_sets(gaps, final)
    if larger is None:
        return []
    inner, said = larger
    evidence = (Evidence("mass of a kept set without its least likely member, median", f"{inner:.3f}", f"< {said:g}"),)
    title = f"kept sets are larger than top-p {said:g} makes them"
    none = Interval(0.0, 0.0, 0.0)
    return [Finding("top_p", "fault", "likely", title, CAUSES["top_p"].remedy, none, 0.0, evidence)]


def _odd(odd: Sequence[tuple[str, float]], total: int, recorded: Decomposition, rounding: float) -> list[Finding]:
    """Returns the rollouts that are odd, if some are and most are not: a mean over all may hide them."""
    if not odd or 2 * len(odd) > total:
        return []
    mean = float(np.mean([nats for _, nats in odd]))
    names = ", ".join(name for name, _ in odd[:MAX_NAMED]) + (", ..." if len(odd) > MAX_NAMED else "")
    evidence = (Evidence(f"mean |d| of {names}", f"{mean:.2e} nats", f"{rounding:.1e} (rounding)"),)
    nats = mean * len(odd) / total
    title = f"{len(odd)} of {total} rollouts are {mean / rounding:.0f} times rounding apart, and nothing explains them"
    part = _part(nats, recorded.total.value)
    remedy = CAUSES["unexplained"].remedy
    return [
        Finding("unexplained", "note", "likely", title, remedy, Interval(nats, nats, nats), part, evidence),
    ]


def _rest(recorded: Decomposition, residual: Differences, floor: float, rounding: float) -> list[Finding]:
    """Returns what no cause explains, if it is more than rounding; or rounding to 16 bits, if the model has more."""
    nats_of = {share.cause: share.nats for share in recorded.shares}
    left, rounded = nats_of["unexplained"], nats_of["precision"]
    times = (left.value + rounded.value) / rounding
    if left.low <= ROUNDING * rounding and times >= CLEAN:
        seen = Evidence(
            "mean |d| with everything kept and repaired",
            f"{left.value + rounded.value:.2e} nats",
            f"under {CLEAN * rounding:.1e} ({CLEAN:g} times rounding)",
        )
        title = f"{left.value + rounded.value:.1e} nats are unexplained, {times:.1f} times rounding"
        part = _part(left.value, recorded.total.value)
        return [Finding("unexplained", "note", "possible", title, CAUSES["unexplained"].remedy, left, part, (seen,))]
    if left.low <= ROUNDING * rounding:
        if rounding <= floor or residual.mean <= ROUNDING * floor:
            return []
        seen = Evidence("mean |d| left", f"{residual.mean:.2e} nats", f"{rounding:.1e} (16 bits), {floor:.1e} (model)")
        part = _part(rounded.value, recorded.total.value)
        title = "the engine rounds to 16 bits, the model does not"
        return [Finding("precision", "note", "likely", title, CAUSES["precision"].remedy, rounded, part, (seen,))]
    evidence = (
        Evidence(
            "mean |d| with everything kept and repaired", f"{residual.mean:.2e} nats", f"{rounding:.1e} (rounding)"
        ),
        Evidence("mean d", f"{residual.d_N.mean():+.2e} nats", "0"),
    )
    title = "the engine's weights or arithmetic are not the model's"
    share = _part(left.value, recorded.total.value)
    return [Finding("weights", "fault", "likely", title, CAUSES["weights"].remedy, left, share, evidence)]
