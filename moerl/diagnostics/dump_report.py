"""The report of a dump: from its diagnosis, or from the two policies that it brings by itself. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.diagnosis import Diagnosis
from moerl.diagnostics.causes.faults import LEAST_TOKENS
from moerl.diagnostics.causes.gaps import Assumption, Bootstrap, Differences, Plan
from moerl.diagnostics.causes.routes import Place, route_table
from moerl.diagnostics.causes.texts import CAUSES, OPEN
from moerl.diagnostics.dumps.build import EMPTY
from moerl.diagnostics.dumps.rollout import DumpedRollout, Unusable
from moerl.diagnostics.report.data import (
    Decomposition,
    Evidence,
    Finding,
    Interval,
    Report,
    ReportStep,
    Share,
    Strip,
    StripToken,
    StripTurn,
    Unread,
    Verdict,
)
from moerl.diagnostics.report.run_findings import FAR_SHARE, GAP_FAULT, GAP_NOTE
from moerl.diagnostics.tallies import Tallies
from moerl.diagnostics.trainer_side import FACT, FAR_LOG_RATIO, TrainerSide, sampled_gaps, scorer_of_trainer

MAX_STRIP_TOKENS = 400


@dataclass(frozen=True, slots=True)
class DumpFacts:
    """Facts about a dump for its report, next to the numbers."""

    name: str
    """Name of the dump."""
    facts: tuple[tuple[str, str], ...]
    """Names and values for the page, in order."""
    notes: tuple[str, ...]
    """Sentences on what its format does not say."""
    unusable: Unusable
    """Rows that were not used."""
    texts: Sequence[str] = ()
    """Text of each token id; empty without a tokenizer."""
    classes: Sequence[str] = ()
    """Class of each token id; empty without a tokenizer."""


def mismatch_figures(d: NDArray[np.floating]) -> dict[str, float]:
    """Returns the metrics of a scorer, names as of `mismatch/<scorer>/...`: d = trainer log-prob less rollout log-prob,
    nats."""
    d = d.astype(np.float64)
    ratio = np.exp(np.clip(d, -20.0, 20.0))
    return {
        "logprob_abs_mean": float(np.abs(d).mean()),
        "logprob_abs_max": float(np.abs(d).max()),
        "k3": float((ratio - 1.0 - np.clip(d, -20.0, 20.0)).mean()),
        "ratio_mean": float(ratio.mean()),
        "share_outside_tenth": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
        "share_above_ln2": float((np.abs(d) > FAR_LOG_RATIO).mean()),
    }


def report_of_diagnosis(diagnosis: Diagnosis, facts: DumpFacts) -> Report:
    """Returns the report of a dump that a model has scored."""
    gaps, final = diagnosis.gaps, diagnosis.final
    scorer, recorded = gaps.scorers[0], diagnosis.as_recorded
    tallied = [_tallied(diagnosis, recorded, facts)]
    if diagnosis.faults:
        # Results with every fault taken back, next to those of the dump as it came.
        tallied.append(_tallied(diagnosis, final, facts, ", repaired"))
    came = tallied[0][0]
    table = {
        "neither": [Assumption()] * len(gaps.rollouts),
        "kept_sets": [replace(each, routing="own") for each in recorded],
        "experts": [replace(each, kept="full") for each in recorded],
        "both": recorded,
    }
    if all(each.kept == "full" for each in recorded):
        del table["kept_sets"]
    if diagnosis.route_agreement is None:
        table = {name: each for name, each in table.items() if name in ("neither", "kept_sets")}
    ours = {name: gaps.differences(each) for name, each in table.items()}
    figures = {name: mismatch_figures(each.d_N) for name, each in ours.items()}
    findings, trainer = diagnosis.findings, TrainerSide(gaps, table, final, diagnosis.own_floor)
    has_trainer = bool(trainer.there())
    if has_trainer:
        findings = (*findings, *trainer.findings())
        for name, nats in trainer.distances().items():
            figures[name]["trainer_distance"] = nats
        figures["trainer"] = mismatch_figures(trainer.from_engine())
    if any(finding.level == "fault" for finding in diagnosis.findings):
        figures["repaired"] = mismatch_figures(diagnosis.residual.d_N)
    figures["floor"] = {"logprob_abs_mean": diagnosis.floor}
    return Report(
        title=f"Routing mismatch of {facts.name}",
        subtitle=f"{len(gaps.rollouts)} rollouts, {gaps.starts[-1]:,} sampled tokens, scored by {scorer.name}",
        verdict=verdict(findings, diagnosis.decompositions, diagnosis.floor),
        facts=(*facts.facts, *([(FACT, trainer.said())] if has_trainer else [])),
        decompositions=diagnosis.decompositions,
        findings=(*findings, *_empty(facts.unusable)),
        scorers=figures,
        steps=_steps(gaps.rollouts, gaps.differences(recorded)),
        layers=came.layers(),
        maps=tuple(each for tallies, _ in tallied for each in tallies.maps()),
        swaps=came.swaps(),
        histograms=tuple(each for tallies, _ in tallied for each in tallies.histograms()),
        slices=tuple(each for tallies, _ in tallied for each in tallies.slices()),
        strips=tuple(each for _, strips in tallied for each in strips),
        unusable=_unread(facts.unusable),
        notes=facts.notes,
    )


def _tallied(diagnosis: Diagnosis, plan: Plan, facts: DumpFacts, label: str = "") -> tuple[Tallies, tuple[Strip, ...]]:
    """Returns tallies and strips under a plan, with the model's own routing on its tokens. Records count from their
    start, as far as they have rows and layers of the model. label: suffix of names."""
    gaps, spec = diagnosis.gaps, diagnosis.gaps.scorers[0].spec
    newest = max((each.version for each in gaps.scorers if each.version is not None), default=-1)
    sizes = spec.num_moe_layers, spec.num_experts, spec.experts_per_token
    tallies = Tallies(*sizes, classes=facts.classes, current_version=newest, label=label)
    d, rollouts, differing = gaps.differences(plan), list[DumpedRollout](), list[NDArray[np.int64] | None]()
    for number, (rollout, score) in enumerate(zip(gaps.repaired(plan), gaps.scores(plan), strict=True)):
        if rollout.expert_ids is not None:
            ids, there = route_table(rollout, score.own_ids.shape, Place())
            rollout = replace(rollout, expert_ids=ids, routed=there.any(1))
        rollouts.append(rollout)
        part = slice(*d.starts[number : number + 2])
        differing.append(tallies.add(rollout, score.own_ids, d.d_N[part], score.margins))
    return tallies, _strips(rollouts, d, differing, facts.texts, label)


def verdict(findings: Sequence[Finding], decompositions: Sequence[Decomposition], floor: float) -> Verdict:
    """Returns two sentences: the faults and how sure they are, and what to change. A dump is in order if it has no
    fault and everything is explained."""
    faults = [finding for finding in findings if finding.level == "fault"]
    left = [finding for finding in findings if finding.cause in OPEN and finding.level == "note"]
    and_rest = "".join(f" {finding.title[0].upper()}{finding.title[1:]}." for finding in left)
    gap = decompositions[0].total.value
    if faults:
        named = "; ".join(f"{finding.title} ({_how_sure(finding)})" for finding in faults[:3])
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        remedies = dict.fromkeys(finding.remedy for finding in faults[:3])
        return Verdict("fault", f"{named[0].upper()}{named[1:]}{more}.{and_rest}", " ".join(remedies))
    unsaid = next((finding for finding in findings if finding.cause == "temperature_unsaid"), None)
    if unsaid is not None:
        text = f"The dump does not say its temperature: {unsaid.title}."
        return Verdict("note", text + and_rest, unsaid.remedy)
    if left:
        remedies = dict.fromkeys(finding.remedy for finding in left)
        return Verdict("note", f"Not all is explained.{and_rest}", " ".join(remedies))
    shares = {share.cause: share.nats.value for share in decompositions[0].shares}
    kept = (("routing", "own routing"), ("masks", "sampling masks"))
    parts = [f"{shares[c] / gap:.0%} by {name}" for c, name in kept if shares.get(c, 0.0) > 0.0 and gap > 0.0]
    left = decompositions[-1].total.value
    if not {"masks", "routing"} & shares.keys():
        text = (
            f"Nothing is wrong that shows: engine and model are {left:.1e} nats apart, which is rounding, and the other"
            f" experts that rounding chooses ({floor:.1e})."
        )
        return Verdict("good", text, "Dump routes and kept sets: with them, smaller faults show.")
    text = (
        f"Nothing is wrong with this record: with what it keeps enforced, engine and model are {left:.1e} nats apart,"
        f" which is rounding ({floor:.1e})."
    )
    return Verdict("good", text, f"Keep enforcing it: without, the gap is {gap:.1e} nats, made {' and '.join(parts)}.")


def _how_sure(finding: Finding) -> str:
    """Returns how sure a fault is, and its part of the gap if it has one."""
    return finding.confidence + (f", {finding.share:.0%} of the gap as recorded" if finding.share else "")


def report_of_policies(
    rollouts: Sequence[DumpedRollout], tallies: Tallies, facts: DumpFacts, differing: Mapping[str, NDArray[np.int64]]
) -> Report:
    """Returns the report of a dump that brings the trainer's log-probs, without a model.

    Args:
        rollouts: a sample, each with `trainer_logprobs`, for steps and strips. tallies: of the whole dump. differing:
            per row the layers that differ, of those of the sample with both routes.
    """
    d = np.concatenate(tallies.d).astype(np.float64)
    starts = np.cumsum([0, *map(len, tallies.d)])
    total = Bootstrap.of(starts).mean(np.abs(d))
    parts = (Share("unexplained", "not taken apart without a model", total),)
    figures, findings = mismatch_figures(d), _as_dumped(d, starts, total, tallies.names)
    text = (
        f"Trainer and engine are {total.value:.1e} nats apart, and {figures['share_above_ln2']:.1%} of the tokens by"
        f" more than a factor of 2{'' if findings else f'; below {GAP_NOTE:g} nats it is healthy'}."
    )
    is_fault = any(finding.level == "fault" for finding in findings)
    level = "fault" if is_fault else "note" if findings else "good"
    advice = findings[0].remedy if findings else "Nothing to do. With --model smaller faults show."
    if not d.any():
        level, text = "note", "The trainer's log-probs are the engine's, digit for digit: this dump compares nothing."
        advice = "Unless both sides compute alike to the last bit, dump the log-probs that the trainer computes itself."
    text += "".join(f" {each.title[0].upper()}{each.title[1:]}." for each in findings if each.rollouts)
    sampled_d = [sampled_gaps(rollout) for rollout in rollouts]
    sample = Differences(np.concatenate(sampled_d), np.cumsum([0, *map(len, sampled_d)]))
    return Report(
        title=f"Routing mismatch of {facts.name}",
        subtitle=f"{tallies.num_rollouts:,} rollouts, {len(d):,} sampled tokens, both policies as dumped",
        verdict=Verdict(level, text, advice),
        facts=facts.facts,
        decompositions=(Decomposition("as dumped", total, parts),),
        findings=(*findings, *_empty(facts.unusable)),
        scorers={scorer_of_trainer(rollouts[0]): figures},
        steps=_steps(rollouts, sample),
        layers=tallies.layers(),
        maps=tallies.maps(),
        swaps=tallies.swaps(),
        histograms=tallies.histograms(),
        slices=tallies.slices(),
        strips=_strips(rollouts, sample, [differing.get(rollout.name) for rollout in rollouts], facts.texts),
        unusable=_unread(facts.unusable),
        notes=facts.notes,
    )


def _as_dumped(
    d: NDArray[np.float64], starts: NDArray[np.int64], total: Interval, names: Sequence[str]
) -> list[Finding]:
    """Returns a finding if the gap of two policies, or that of single rollouts, is more than a healthy one."""
    far = float((np.abs(d) > FAR_LOG_RATIO).mean())
    remedy = "Give the model with --model to learn the causes."
    if total.value >= GAP_NOTE or far > FAR_SHARE:
        is_fault = total.value >= GAP_FAULT or far > FAR_SHARE
        title = f"trainer and engine are {total.value:.1e} nats apart"
        evidence = (Evidence("mean |d|", f"{total.value:.2e} nats", f"below {GAP_NOTE:g}"),)
        level = "fault" if is_fault else "note"
        return [Finding("unexplained", level, "certain", title, remedy, total, 1.0, evidence)]
    counts = np.diff(starts)
    means = np.add.reduceat(np.abs(d), starts[:-1]) / counts
    odd = np.flatnonzero((counts >= LEAST_TOKENS) & (means >= GAP_FAULT)).tolist()
    if not odd:
        return []
    nats = float((means * counts)[odd].sum() / counts.sum())
    are = "is" if len(odd) == 1 else "are"
    title = f"{len(odd)} of {len(counts)} rollouts {are} {float(means[odd].mean()):.1e} nats apart"
    named = tuple(names[number] for number in odd)
    evidence = (Evidence("rollouts", ", ".join(named[:8])),)
    of_them, part = Interval(nats, nats, nats), min(1.0, nats / max(total.value, 1e-12))
    return [Finding("unexplained", "note", "certain", title, remedy, of_them, part, evidence, named)]


def _steps(rollouts: Sequence[DumpedRollout], d: Differences) -> tuple[ReportStep, ...]:
    """Returns a step for each training step of the dump if it names several; else none."""
    numbers = np.repeat([rollout.step for rollout in rollouts], np.diff(d.starts))
    found = np.unique(numbers[numbers >= 0]).tolist()
    if len(found) < 2:
        return ()
    return tuple(
        ReportStep(
            step, {f"mismatch/{name}": value for name, value in mismatch_figures(d.d_N[numbers == step]).items()}
        )
        for step in found
    )


def _strips(
    rollouts: Sequence[DumpedRollout],
    d: Differences,
    differing: Sequence[NDArray[np.int64] | None],
    texts: Sequence[str],
    label: str = "",
) -> tuple[Strip, ...]:
    """Returns the rollout with the largest mean |d|, a typical one, and the one with the smallest."""
    order = np.argsort(d.means)
    chosen = {int(order[-1]): "largest gap", int(order[len(order) // 2]): "typical", int(order[0]): "smallest gap"}
    return tuple(
        _strip(rollouts[i], d.d_N[d.starts[i] : d.starts[i + 1]], differing[i], texts, why + label)
        for i, why in chosen.items()
    )


def _strip(
    rollout: DumpedRollout,
    d_T: NDArray[np.float64],
    differing: NDArray[np.int64] | None,
    texts: Sequence[str],
    why: str,
) -> Strip:
    tokens: list[StripToken] = []
    d = np.zeros(len(rollout))
    d[rollout.sampled] = d_T
    sizes = None if rollout.kept is None else rollout.kept.sizes
    first = max(0, rollout.num_prompt - 32)
    for t in range(first, min(len(rollout), first + MAX_STRIP_TOKENS)):
        token = int(rollout.token_ids[t])
        text = texts[token] if token < len(texts) else f"[{token}]"
        layers = int(differing[t - 1]) if differing is not None and t and differing[t - 1] >= 0 else None
        if not rollout.sampled[t]:
            tokens.append(StripToken(text, False, layers=layers))
            continue
        logprob, version = float(rollout.rollout_logprobs[t]), int(rollout.policy_versions[t])
        kept = None if sizes is None else int(sizes[t])
        tokens.append(StripToken(text, True, float(d[t]), logprob, layers, kept, version if version >= 0 else None))
    return Strip(rollout.name, why, tuple(tokens), _strip_turns(rollout, first, first + len(tokens)))


def _strip_turns(rollout: DumpedRollout, first: int, end: int) -> tuple[StripTurn, ...]:
    """Returns the turns of a rollout that begin in a part of it; none if there is a single one."""
    changes = (np.diff(rollout.turns) != 0) | (rollout.sampled[1:] != rollout.sampled[:-1])
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    if sum(bool(rollout.sampled[start]) for start in starts) < 2:
        return ()
    turns: list[StripTurn] = []
    number = 0
    for start, behind in itertools.pairwise([*starts, len(rollout)]):
        number += bool(rollout.sampled[start])
        name = f"policy, turn {number}" if rollout.sampled[start] else "environment" if start else "prompt"
        if behind > first and start < end:
            turns.append(StripTurn(max(start - first, 0), name))
    return tuple(turns)


def _empty(unusable: Unusable) -> tuple[Finding, ...]:
    """Returns a note on rollouts without a sampled token, which are in no number of the report."""
    count = unusable.counts[EMPTY]
    if not count:
        return ()
    title = f"{count:,} rollout{' has' if count == 1 else 's have'} an empty response, or one without sampled tokens"
    evidence = (Evidence("first of them", unusable.examples[EMPTY]), Evidence("in the numbers of this report", "no"))
    none = Interval(0.0, 0.0, 0.0)
    remedy = CAUSES["empty_responses"].remedy
    return (Finding("empty_responses", "note", "certain", title, remedy, none, 0.0, evidence),)


def _unread(unusable: Unusable) -> tuple[Unread, ...]:
    return tuple(Unread(reason, count, unusable.examples[reason]) for reason, count in unusable.counts.most_common())
