"""The parts of a report's page as HTML, in their order; a part without data is None. Torch-free; any process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moerl.diagnostics.published import MEASURES, PUBLISHED
from moerl.diagnostics.report import figures
from moerl.diagnostics.report.charts import Chart
from moerl.diagnostics.report.data import Decomposition, Finding, Report, Verdict
from moerl.diagnostics.report.definitions import DEFINITIONS, title_of
from moerl.diagnostics.report.words import escaped, folded, interval, number, percent, table
from moerl.telemetry.metrics import METRICS, SCORERS

LEVELS = {"good": "✓ In order", "note": "● Note", "fault": "! Fault"}
SURE = {"certain": "certain: measured", "likely": "likely", "possible": "possible"}
MAX_SWAPS = 200
"""Rows of the table of swaps."""
_SCORED = SCORERS | {"trainer": "the trainer's log-probs that the dump brings"}
_COMPARED = ("neither", "both", "trainer", "trained")
"""Scorers whose figures stand next to those that others published."""
_SHARES = ("share_outside_tenth", "share_above_ln2", "tokens_with_different_experts")


@dataclass(frozen=True, slots=True)
class PageSection:
    """One part of a page."""

    name: str
    """Anchor of the part."""
    title: str
    """Heading, also in the list of contents."""
    body: str
    """HTML."""
    charts: tuple[Chart, ...] = ()
    """Charts that `body` has places for."""


def figure(chart: Chart) -> str:
    """Returns the place of a chart, with its choices, its sentence and its folded rows."""
    name, first = chart.name, chart.choices[0]
    choose = ""
    if len(chart.choices) > 1:
        choose = (
            f'<div class="choose"><label for="{name}-choice">{chart.ask.capitalize()}</label>'
            f'<select id="{name}-choice">{_options(chart)}</select>'
            f'<span class="printed">{escaped(first.label)}</span></div>'
        )
    return (
        f'<figure data-chart="{name}">{choose}<figcaption>{escaped(first.caption)}</figcaption>'
        f'<div class="plot" role="img" aria-label="{escaped(first.caption)}"></div>'
        + folded(
            "Numbers of this chart", '<div class="scroll rows" tabindex="0" role="region" aria-label="numbers"></div>'
        )
        + "</figure>"
    )


def _options(chart: Chart) -> str:
    parts: list[str] = []
    for group, numbered in itertools.groupby(enumerate(chart.choices), key=lambda each: each[1].group):
        options = "".join(f'<option value="{place}">{escaped(choice.label)}</option>' for place, choice in numbered)
        parts.append(f'<optgroup label="{escaped(group)}">{options}</optgroup>' if group else options)
    return "".join(parts)


def verdict_box(verdict: Verdict) -> str:
    """Returns the box on top."""
    return (
        f'<section class="verdict level-{verdict.level}" aria-label="verdict">'
        f'<p class="badge">{LEVELS[verdict.level]}</p><p class="text">{escaped(verdict.text)}</p>'
        f'<p class="advice"><strong>What to change:</strong> {escaped(verdict.advice)}</p></section>'
    )


def facts_list(facts: Sequence[tuple[str, str]]) -> str:
    """Returns names and values as a list; empty without facts."""
    pairs = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{pairs}</dl>' if facts else ""


def gap(report: Report) -> PageSection | None:
    """Returns the gap decomposed."""
    chart = figures.decomposition([("", report)])
    if chart is None:
        return None
    tables = decomposition_table([("", each) for each in report.decompositions])
    lead = (
        "<p class=\"lead\">How far the trainer's log-prob of a sampled token is from the sampler's (d), and what makes"
        " it. Parts add up to their gap; one below zero makes the others' gap smaller.</p>"
    )
    return PageSection("gap", "The gap and its parts", lead + figure(chart) + tables + published(report), (chart,))


def published(report: Report) -> str:
    """Returns a folded table of what others measured, this report's figures of the same measure above them."""
    shown = {name: values for name, values in report.scorers.items() if name in _COMPARED}
    if not any(measure in values for values in shown.values() for measure in MEASURES):
        return ""
    rows: list[list[str]] = []
    for measure, title in MEASURES.items():
        rows += [
            [title, number(values[measure]), f"<strong>this report: {escaped(name)}</strong>", ""]
            for name, values in shown.items()
            if measure in values
        ]
        rows += [
            [title, number(each.value), escaped(each.setting), f"<code>{escaped(each.source)}</code>"]
            for each in PUBLISHED
            if each.measure == measure
        ]
    note = (
        "Compare k3 with k3 and mean |d| with mean |d|: the first is of second order in d. Their models, lengths and"
        " arithmetic are not yours, so figures tell the order of magnitude."
    )
    return folded("Figures that others published", table(("measure", "value", "of", "source"), rows, note, texts=4))


def decomposition_table(gaps: Sequence[tuple[str, Decomposition]]) -> str:
    """Returns a table of parts with intervals and shares."""
    colors = figures.part_colors([each for _, each in gaps])
    rows: list[list[str]] = []
    for name, each in gaps:
        title = escaped(f"{name}: {each.name}" if name else each.name)
        for number_, share in enumerate(each.shares):
            swatch = f'<span class="swatch" style="background:{colors[share.label]}"></span>'
            part = percent(share.nats.value / each.total.value) if each.total.value > 0.0 else "-"
            rows.append(["" if number_ else title, swatch + escaped(share.label), interval(share.nats), part])
        rows.append(
            ["" if each.shares else title, "<strong>all</strong>", f"<strong>{interval(each.total)}</strong>", "100%"]
        )
    note = "Nats, mean |d| over tokens; [95% interval] if rollouts could be drawn again."
    return table(("gap", "part", "nats", "share"), rows, note, texts=2)


def findings(report: Report) -> PageSection | None:
    """Returns a card for each finding, faults first."""
    if not report.findings:
        return None
    order = {"fault": 0, "note": 1, "good": 2}
    cards = "".join(_card(each) for each in sorted(report.findings, key=lambda each: order[each.level]))
    return PageSection("findings", "Findings", f'<div class="cards">{cards}</div>')


def _card(finding: Finding) -> str:
    size = f"{interval(finding.nats)} nats, {percent(finding.share)} of the gap · " if finding.nats.value else ""
    facts = "".join(
        f"<li>{escaped(each.what)}: <strong>{escaped(each.seen)}</strong>"
        + (f" (expected: {escaped(each.expected)})" if each.expected else "")
        + "</li>"
        for each in finding.evidence
    )
    return (
        f'<article class="card level-{finding.level}">'
        f'<p class="badge">{LEVELS[finding.level]} · {escaped(finding.cause.replace("_", " "))}</p>'
        f'<h3>{escaped(finding.title)}</h3><p class="size quiet">{size}{SURE[finding.confidence]}</p>'
        f"<p>{escaped(finding.remedy)}</p>" + (f"<ul>{facts}</ul>" if facts else "") + "</article>"
    )


def scorers(report: Report) -> PageSection | None:
    """Returns the table of figures by scorer."""
    if not report.scorers:
        return None
    names = list(report.scorers)
    figures_ = list(dict.fromkeys(name for values in report.scorers.values() for name in values))
    head = [
        "figure",
        *(f"{escaped(name)}<br><span class='quiet'>{escaped(_SCORED.get(name, ''))}</span>" for name in names),
    ]
    rows = [
        [escaped(figure_title(key)), *(scorer_cell(report.scorers[name], key) for name in names)] for key in figures_
    ]
    lead = (
        '<p class="lead">The same tokens and weights, scored with more or less of the record enforced. The gap between'
        " <em>neither</em> and <em>both</em> is what the two guarantees remove.</p>"
    )
    return PageSection("scorers", "Scorers", lead + table(head, rows))


def figure_title(key: str) -> str:
    """Returns the title of a figure of a scorer, by its name without prefix."""
    if key == "trainer_distance":
        return "Trainer less this scorer, mean"
    return title_of(f"mismatch/{key}", key)


def scorer_cell(values: Mapping[str, float], key: str) -> str:
    """Returns one figure of a scorer as text; empty if it has none."""
    if key not in values:
        return ""
    return percent(values[key]) if key in _SHARES else number(values[key])


def over_steps(reports: Sequence[figures.Named]) -> PageSection | None:
    """Returns any metric over steps."""
    chart = figures.over_steps(reports)
    return chart and PageSection("steps", "Over steps", figure(chart), (chart,))


def layers(report: Report) -> PageSection | None:
    """Returns heat maps, single layers to choose from, and a table."""
    charts = [chart for chart in (figures.layer_maps(report), figures.single_layers(report)) if chart]
    body = "".join(figure(chart) for chart in charts)
    if report.layers:
        rows = [
            [str(each.layer), percent(each.differing), number(each.jaccard)]
            + [_or_dash(margin) for margin in (each.margin_at_flips, each.margin_elsewhere)]
            for each in report.layers
        ]
        head = ("MoE layer", "rows with other experts", "overlap (Jaccard)", "margin at flips", "margin elsewhere")
        body += folded("Table of all layers", table(head, rows))
    if not body:
        return None
    lead = '<p class="lead">Rows in which the trainer\'s own router would have chosen other experts than recorded.</p>'
    return PageSection("layers", "Layers", lead + body, tuple(charts))


def _or_dash(value: float | None, form: Callable[[float], str] = number) -> str:
    return "-" if value is None else form(value)


def margins(report: Report) -> PageSection | None:
    """Returns score margins by layer, and histograms."""
    charts = [chart for chart in (figures.margins(report), figures.histograms(report)) if chart]
    lead = (
        '<p class="lead">Flips at small margins are ties that rounding decides. Flips at margins as large as elsewhere'
        " are a fault: other weights, other inputs or routes of other rows.</p>"
    )
    body = lead + "".join(figure(chart) for chart in charts)
    return PageSection("margins", "Margins at flips", body, tuple(charts)) if charts else None


def swaps(report: Report) -> PageSection | None:
    """Returns tables of experts that replace one another."""
    if not report.swaps:
        return None
    shown = sorted(report.swaps, key=lambda each: each.count, reverse=True)[:MAX_SWAPS]
    left = len(report.swaps) - len(shown)
    note = f'<p class="quiet">{left:,} rarer swaps are in report.json alone.</p>' if left else ""
    rows = [
        [str(each.layer), str(each.recorded), str(each.own), f"{each.count:,}", percent(each.share)] for each in shown
    ]
    head = ("MoE layer", "recorded expert", "own expert", "rows", "share of the layer's flips")
    body = table(head, rows[:15]) + (folded(f"{len(rows) - 15} more", table(head, rows[15:])) if rows[15:] else "")
    return PageSection("swaps", "Which experts swap", body + note)


def slices(report: Report) -> PageSection | None:
    """Returns gaps and routing by kind of token."""
    if not report.slices:
        return None
    chart = figures.slices(report)
    rows = [
        (
            escaped(each.by),
            escaped(each.name),
            f"{each.num_tokens:,}",
            interval(each.gap) if each.gap else "-",
            _or_dash(each.differing, percent),
        )
        for each in report.slices
    ]
    head = ("by", "slice", "tokens", "mean |d|, nats", "rows with other experts")
    body = (figure(chart) if chart else "") + folded("Table of all slices", table(head, rows, texts=2))
    return PageSection("slices", "Slices", body, (chart,) if chart else ())


def unusable(report: Report) -> PageSection | None:
    """Returns a table of rows left out, by reason."""
    if not report.unusable:
        return None
    rows = [
        [escaped(each.reason), f"<code>{escaped(each.example)}</code>", f"{each.count:,}"] for each in report.unusable
    ]
    return PageSection("unusable", "Unusable rows", table(("reason", "example", "rows"), rows, texts=2))


def definitions() -> PageSection:
    """Returns every figure: formula, source, and its names elsewhere."""
    parts: list[str] = []
    for each in DEFINITIONS:
        unit = f" ({METRICS[each.metric].unit})" if each.metric else ""
        meaning = each.meaning or METRICS[each.metric].meaning
        pairs = [("meaning", escaped(meaning)), ("formula", f"<code>{escaped(each.formula)}</code>")]
        pairs += [("in metrics.jsonl", f"<code>{escaped(each.metric)}</code>{escaped(unit)}")] if each.metric else []
        pairs += [("source", escaped(each.source))] if each.source else []
        named = [f"{escaped(system)}: <code>{escaped(name)}</code>" for system, name in each.elsewhere]
        pairs += [("elsewhere", "<br>".join(named))] if named else []
        inner = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in pairs)
        parts.append(folded(escaped(each.title), f"<dl>{inner}</dl>"))
    return PageSection("definitions", "Definitions", f'<div class="definitions">{"".join(parts)}</div>')


def notes(report: Report) -> PageSection | None:
    """Returns the limits of the numbers as a list."""
    if not report.notes:
        return None
    return PageSection(
        "notes", "Notes", "<ul>" + "".join(f"<li>{escaped(each)}</li>" for each in report.notes) + "</ul>"
    )
