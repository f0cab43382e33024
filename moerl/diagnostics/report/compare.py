"""Several reports on one page, side by side. Torch-free; any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moerl.diagnostics.report import figures, sections
from moerl.diagnostics.report.data import Finding, Report, Verdict
from moerl.diagnostics.report.figures import Named
from moerl.diagnostics.report.page import write_html
from moerl.diagnostics.report.run_findings import GAP_NOTE, RECENT
from moerl.diagnostics.report.sections import PageSection, figure
from moerl.diagnostics.report.words import brief, escaped, folded, percent, table

RATIO_NOTE, RATIO_FAULT, MIN_DIFFERENCE = 1.25, 2.0, 1e-3
"""Largest gap over smallest from which reports differ, if they are so many nats apart, and from which it is a fault, if
the largest is worth a note by itself."""
_GAP = "mismatch/logprob_abs_mean"
_RANKS = {"good": 0, "note": 1, "fault": 2}
_PREFERRED = ("as trained", "as recorded", "as dumped", "nothing kept")


def write_comparison(reports: Sequence[Named], path: Path) -> Verdict:
    """Writes one page of two reports or more, whose names must differ; returns its verdict. Raises `OSError` if it
    cannot."""
    parts = (
        _verdicts(reports),
        _gaps(reports),
        _scorers(reports),
        sections.over_steps(reports),
        _layers(reports),
        sections.definitions(),
    )
    names = [name for name, _ in reports]
    verdict = verdict_of(reports)
    tops = sections.verdict_box(verdict), _facts(reports)
    titles = (f"Routing mismatch: {', '.join(names[:-1])} and {names[-1]}", f"{len(names)} reports side by side")
    write_html(path, titles, tops, [part for part in parts if part])
    return verdict


def gap_of(report: Report) -> tuple[str, float] | None:
    """Returns the gap that reports are compared by: its name, and mean |d| in nats; None without one."""
    totals = {each.name: each.total.value for each in report.decompositions}
    for name in _PREFERRED:
        if name in totals:
            return name, totals[name]
    steps = [step.metrics[_GAP] for step in report.steps if _GAP in step.metrics]
    return ("as trained", steps[-1]) if steps else None


def _gaps_of(reports: Sequence[Named]) -> list[tuple[str, Report, tuple[str, float]]]:
    """Returns the gaps to compare: over the last steps that all have in common, if all have steps, and of each report
    otherwise. The gap of a run changes with its steps, so the ends of runs of two lengths are not comparable."""
    of_steps = [
        {s.step: s.metrics[_GAP] for s in report.steps if _GAP in s.metrics} if gap_of(report) else {}
        for _, report in reports
    ]
    common = sorted(set.intersection(*map(set, of_steps))) if of_steps else []
    if not common or len({frozenset(steps) for steps in of_steps}) == 1:
        return [(name, report, found) for name, report in reports if (found := gap_of(report)) is not None]
    chosen = common[-RECENT:]
    of = f"as trained in steps {chosen[0]} to {chosen[-1]}" if len(chosen) > 1 else f"as trained in step {chosen[0]}"
    means = [sum(steps[each] for each in chosen) / len(chosen) for steps in of_steps]
    return [(name, report, (of, mean)) for (name, report), mean in zip(reports, means, strict=True)]


def verdict_of(reports: Sequence[Named]) -> Verdict:
    """Returns the difference between the reports, and the remedy of the worst finding that only the worst report has.
    Faults outrank agreement."""
    verdict = _difference(reports)
    worst_name, worst = max(reports, key=lambda each: _RANKS[each[1].verdict.level])
    if _RANKS[worst.verdict.level] <= _RANKS[verdict.level] or worst.verdict.level == "good":
        return verdict
    count = sum(report.verdict.level == worst.verdict.level for _, report in reports)
    which = "all have" if count == len(reports) else f"{worst_name} has" if count == 1 else f"{count} of them have"
    what = "a fault" if worst.verdict.level == "fault" else "a note"
    return replace(worst.verdict, text=f"{verdict.text} But {which} {what}: {worst.verdict.text}")


def _difference(reports: Sequence[Named]) -> Verdict:
    gaps = _gaps_of(reports)
    if len(gaps) < 2:
        text = "Fewer than two of the reports have a gap to compare."
        return Verdict("note", text, "Compare runs with mismatch metrics.")
    best, worst = (pick(gaps, key=lambda each: each[2][1]) for pick in (min, max))
    low, high = best[2][1], worst[2][1]
    kinds = {found[0] for *_, found in gaps}
    of = f"mean |d| {kinds.pop()}" if len(kinds) == 1 else "mean |d|"
    if high - low < MIN_DIFFERENCE or high < RATIO_NOTE * low:
        text = f"The reports agree: {of} is {brief(low)} to {brief(high)} nats."
        return Verdict("good", text, "Nothing: the differences are too small to act on.")
    more = f"{high / low:.1f} times" if low > 0.0 else "larger than"
    text = f"The gap of {worst[0]} is {more} that of {best[0]}: {of} is {brief(high)} against {brief(low)} nats"
    part = _most_different(best[1], worst[1], worst[2][0])
    found = _only_there(best[1], worst[1])
    advice = f"{found.title}: {found.remedy}" if found else "Compare the facts below: one of them makes the difference."
    level = "fault" if high >= max(RATIO_FAULT * low, GAP_NOTE) else "note"
    return Verdict(level, f"{text}{part}.", advice)


def _most_different(best: Report, worst: Report, name: str) -> str:
    """Returns the part of the gap `name` that differs most between two reports, as a clause; empty if it has one
    part."""
    before, after = (
        {s.label: s.nats.value for each in report.decompositions if each.name == name for s in each.shares}
        for report in (best, worst)
    )
    labels = {*before, *after}
    if len(labels) < 2:
        return ""
    change = {label: after.get(label, 0.0) - before.get(label, 0.0) for label in sorted(labels)}
    label = max(change, key=lambda each: change[each])
    return f"; most of the difference is in {label}"


def _only_there(best: Report, worst: Report) -> Finding | None:
    """Returns the heaviest finding of `worst` that is not in order there, and that `best` has not at this level."""
    of_best = {(each.cause, each.level) for each in best.findings}
    candidates = [each for each in worst.findings if each.level != "good" and (each.cause, each.level) not in of_best]
    return max(candidates, key=lambda each: (each.level == "fault", each.nats.value), default=None)


def _facts(reports: Sequence[Named]) -> str:
    """Returns facts in a table; those that differ are marked."""
    names = list(dict.fromkeys(key for _, report in reports for key, _ in report.facts))
    rows: list[list[str]] = []
    for key in names:
        values = [dict(report.facts).get(key, "-") for _, report in reports]
        cells = [f"<strong>{escaped(value)}</strong>" if len(set(values)) > 1 else escaped(value) for value in values]
        rows.append([escaped(key), *cells])
    return table(_head(reports, "fact"), rows, "What differs is bold.", texts=1 + len(reports)) if rows else ""


def _head(reports: Sequence[Named], *first: str) -> list[str]:
    """Returns the headings of a table with a column for each report."""
    return [*first, *(escaped(name) for name, _ in reports)]


def _verdicts(reports: Sequence[Named]) -> PageSection:
    boxes = "".join(
        f'<article class="card level-{report.verdict.level}">'
        f'<p class="badge">{sections.LEVELS[report.verdict.level]}</p>'
        f"<h3>{escaped(name)}</h3><p>{escaped(report.verdict.text)}</p><p>{escaped(report.verdict.advice)}</p></article>"
        for name, report in reports
    )
    return PageSection("verdicts", "Verdict of each", f'<div class="cards">{boxes}</div>')


def _gaps(reports: Sequence[Named]) -> PageSection | None:
    chart = figures.decomposition(reports)
    if chart is None:
        return None
    gaps = [(name, each) for name, report in reports for each in report.decompositions]
    return PageSection("gap", "The gaps and their parts", figure(chart) + sections.decomposition_table(gaps), (chart,))


def _scorers(reports: Sequence[Named]) -> PageSection | None:
    scorers = list(dict.fromkeys(scorer for _, report in reports for scorer in report.scorers))
    rows: list[list[str]] = []
    for scorer in scorers:
        of_each = [report.scorers.get(scorer, {}) for _, report in reports]
        for key in dict.fromkeys(key for values in of_each for key in values):
            cells = [sections.scorer_cell(values, key) for values in of_each]
            rows.append([escaped(scorer), escaped(sections.figure_title(key)), *cells])
    head = _head(reports, "scorer", "figure")
    return PageSection("scorers", "Scorers", table(head, rows, texts=2)) if rows else None


def _layers(reports: Sequence[Named]) -> PageSection | None:
    chart = figures.layers_side_by_side(reports)
    if chart is None:
        return None
    layers = sorted({each.layer for _, report in reports for each in report.layers})
    by_report = [{each.layer: percent(each.differing) for each in report.layers} for _, report in reports]
    rows = [[str(layer), *(values.get(layer, "-") for values in by_report)] for layer in layers]
    numbers = table(_head(reports, "MoE layer"), rows, "Rows with other experts.")
    return PageSection("layers", "Layers", figure(chart) + folded("Table of all layers", numbers), (chart,))
