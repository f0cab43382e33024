"""The charts of a report, or of several side by side, from its numbers. Torch-free; any process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from moerl.diagnostics.colors import MEANINGS
from moerl.diagnostics.report.charts import (
    MAX_ALL_POINTS,
    MAX_CELLS,
    MAX_COLUMNS,
    MAX_POINTS,
    Chart,
    Choice,
    Column,
    Curve,
    LineStyle,
    band_of,
    grouped,
    heat,
    layer_bars,
    lines,
    page_colors,
    ranges,
    short,
    stacked,
)
from moerl.diagnostics.report.data import Decomposition, Histogram, Interval, LayerMap, Report
from moerl.diagnostics.report.definitions import title_of
from moerl.diagnostics.report.thinning import joined_columns
from moerl.diagnostics.report.words import brief, percent
from moerl.telemetry.metrics import METRICS, NUM_TURNS, SCORERS, turn_metric

Named = tuple[str, Report]
"""A report and the name that its curves get; empty if it is alone."""

_BY_SCORER = ("logprob_abs_mean", "k3", "share_above_ln2")
_BY_TURN = {
    "logprob_abs_mean": "Gap, mean |d|",
    "tokens_with_different_experts": "Tokens with other experts",
    "tokens_mean": "Sampled tokens",
    "reward_mean": "Reward earned",
    "sessions": "Sessions",
}
"""Figures that are drawn by turn, and their titles."""
_TRAINED = "as trained"
_SAMPLED = ("reward", "accuracy", "response", "groups", "episode", "turn")
"""First words of metrics of sampled responses."""
_LEARNING = {
    "Reward": {"reward/mean": "sampled for training", "evaluation/reward/mean": "greedy, dev problems"},
    "Accuracy": {
        "accuracy/mean": "sampled for training",
        "evaluation/accuracy/mean": "greedy, dev problems",
        "heldout/accuracy": "greedy, held-out problems",
    },
}
"""Figures of the chart of learning: metrics of a step, and the names of their curves."""


def decomposition(reports: Sequence[Named]) -> Chart | None:
    """Returns stacked bars, one for each gap of each report."""
    bars = [(name, each) for name, report in reports for each in report.decompositions]
    if not bars:
        return None
    colors = part_colors([each for _, each in bars])
    domain = [*colors]
    blocks = tuple(
        {
            "bar": _of(name, each.name),
            "series": [share.label for share in each.shares],
            "nats": short([share.nats.value for share in each.shares]),
            "order": [domain.index(share.label) for share in each.shares],
        }
        for name, each in bars
    )
    said = "; ".join(f"{_of(name, each.name)}: {brief(each.total.value)} nats" for name, each in bars)
    columns = (Column("bar", "gap", "text"), Column("series", "part", "text"), Column("nats", "nats"))
    choice = Choice("parts", f"The gap and its parts. {said}.", stacked(len(bars), colors), blocks, columns)
    return Chart("decomposition", (choice,))


def part_colors(gaps: Sequence[Decomposition]) -> dict[str, str]:
    """Returns the colour of each part, by its label, in the order in which parts are drawn."""
    causes = {share.label: share.cause for each in gaps for share in each.shares}
    colors = page_colors(causes.values())
    return {label: colors[cause] for label, cause in causes.items()}


def _of(name: str, what: str) -> str:
    return f"{name}: {what}" if name else what


def over_steps(reports: Sequence[Named]) -> Chart | None:
    """Returns every metric over steps; first those by scorer and, of a single report, by turn."""
    names = sorted({name for _, report in reports for step in report.steps for name in step.metrics})
    # Curves of a single report have meanings.
    of_report = page_colors(name for name, _ in reports) if len(reports) > 1 else {}
    limit = max(60, min(MAX_POINTS, MAX_ALL_POINTS // max(1, len(names) * len(reports))))
    choices: list[Choice] = []
    for figure in _BY_SCORER:
        keys = {_TRAINED: f"mismatch/{figure}"} | {how: f"mismatch/{key}/{figure}" for key, how in SCORERS.items()}
        if not any(f"mismatch/{key}/{figure}" in names for key in SCORERS):
            continue
        curves = [
            curve
            for name, report in reports
            for what, key in keys.items()
            if (curve := _curve(report, key, _of(name, what), of_report.get(name) or _meant(key)))
        ]
        metric = f"mismatch/{figure}"
        title = f"{title_of(metric, metric)}, by scorer"
        choices.append(replace(_step_choice(title, metric, curves, limit), group="by scorer"))
    for metric, curves in _by_turn(reports).items():
        choices.append(replace(_step_choice(f"{metric}, by turn", metric, curves, limit), group="by turn"))
    for metric in names:
        curves = [
            curve
            for name, report in reports
            if (curve := _curve(report, metric, name or metric, of_report.get(name) or _meant(metric)))
        ]
        choices.append(replace(_step_choice(metric, metric, curves, limit), group=metric.partition("/")[0]))
    return Chart("steps", tuple(choices), "metric") if choices else None


def _by_turn(reports: Sequence[Named]) -> dict[str, list[Curve]]:
    """Returns the curves of turns of a single report, by the title of their figure."""
    if len(reports) > 1:
        return {}
    ((_, report),) = reports
    colors = page_colors(f"turn {turn + 1}" for turn in range(NUM_TURNS))
    found = {
        meaning: [
            curve
            for turn, (name, color) in enumerate(colors.items(), 1)
            if (curve := _curve(report, turn_metric(turn, figure), name, color))
        ]
        for figure, meaning in _BY_TURN.items()
    }
    return {meaning: curves for meaning, curves in found.items() if len(curves) > 1}


def learning(report: Report) -> Chart | None:
    """Returns reward and accuracy over steps: of the responses that are trained on, and of evaluations."""
    choices: list[Choice] = []
    for figure, ways in _LEARNING.items():
        curves = [curve for key, name in ways.items() if (curve := _curve(report, key, name, _meant(key)))]
        if curves:
            choices.append(_step_choice(figure, figure, curves, MAX_POINTS, from_zero=True))
    return Chart("learning", tuple(choices), "figure") if choices else None


def _meant(metric: str) -> str:
    """Returns the colour of a metric: of its scorer, of sampled responses, or else of values as trained."""
    first, second, *_ = f"{metric}/".split("/")
    found = second if first == "mismatch" and second in SCORERS else "sampled" if first in _SAMPLED else first
    key = found if found in MEANINGS else _TRAINED
    return page_colors([key])[key]


def _curve(report: Report, metric: str, name: str, color: str) -> Curve | None:
    return _through(name, [(step.step, step.metrics.get(metric)) for step in report.steps], color)


def _through(name: str, points: Iterable[tuple[int, float | None]], color: str) -> Curve | None:
    """Returns the curve through the points that have a value; None without any."""
    there = [(x, y) for x, y in points if y is not None]
    return Curve(name, [x for x, _ in there], [y for _, y in there], color) if there else None


def _step_choice(label: str, metric: str, curves: Sequence[Curve], limit: int, *, from_zero: bool = False) -> Choice:
    known = METRICS.get(metric)
    unit = known.unit if known else ""
    title = label if unit in ("", "1") else f"{label}, {unit}"
    spec, blocks = lines(curves, LineStyle("step", title, from_zero=from_zero), limit)
    said = "; ".join(f"{curve.name} {brief(curve.ys[0])} at first, {brief(curve.ys[-1])} at last" for curve in curves)
    many = max(len(curve.xs) for curve in curves)
    thin = (
        f" {many:,} steps are drawn as {limit} points: the smallest and the largest of each stretch."
        if many > limit
        else ""
    )
    columns = (Column("series", "curve", "text"), Column("x", "step"), Column("y", "value"))
    meaning = f" ({known.meaning})" if known and label == metric else ""
    return Choice(label, f"{label}{meaning}: {said}.{thin}", spec, blocks, columns)


def layer_maps(report: Report) -> Chart | None:
    """Returns a heat map for each `LayerMap`; columns are averaged if there are many."""
    choices = [_map_choice(each, _columns(report)) for each in report.maps if each.differing]
    return Chart("maps", tuple(choices), "map") if choices else None


def _columns(report: Report) -> int:
    """Returns how many columns of each map are drawn."""
    num_layers = sum(len(each.differing) for each in report.maps)
    return max(12, min(MAX_COLUMNS, MAX_CELLS // max(1, num_layers)))


def _map_choice(each: LayerMap, limit: int) -> Choice:
    drawn = joined_columns(each, limit)
    spec = heat(len(drawn.differing), each.name)
    layers = _rows(drawn)
    blocks = tuple(
        {"layer": layer, "column": names, "share": short(shares), "band": [band_of(share) for share in shares]}
        for layer, names, shares in layers
    )
    said = "no rows"
    if layers:
        layer, names, shares = max(layers, key=lambda row: max(row[2]))
        said = f"largest {percent(max(shares))}, layer {layer}, {each.name} {names[shares.index(max(shares))]}"
    is_joined = len(drawn.columns) < len(each.columns)
    joined = f" Columns are means of {len(each.columns):,} in {len(drawn.columns)} groups." if is_joined else ""
    caption = f"Share of rows whose experts differ, by MoE layer and {each.name}: {said}.{joined}"
    head = (Column("layer", "MoE layer"), Column("column", each.name, "text"), Column("share", "differing", "percent"))
    return Choice(f"by {each.name}", caption, spec, blocks, head)


def _rows(drawn: LayerMap) -> list[tuple[int, list[str], list[float]]]:
    """Returns the layers that have values, each with the columns of its values."""
    found: list[tuple[int, list[str], list[float]]] = []
    for layer, row in enumerate(drawn.differing):
        there = [(column, value) for column, value in zip(drawn.columns, row, strict=True) if value is not None]
        if there:
            found.append((layer, [column for column, _ in there], [value for _, value in there]))
    return found


def single_layers(report: Report) -> Chart | None:
    """Returns each layer of each map as a drawing of its own."""
    choices: list[Choice] = []
    for each in report.maps:
        for layer, columns, values in _rows(joined_columns(each, _columns(report))):
            shares = short(values)
            spec, blocks = layer_bars(each.name, max(shares)), ({"column": columns, "share": shares},)
            mean = percent(sum(shares) / len(shares))
            caption = f"MoE layer {layer}, by {each.name}: mean {mean}, largest {percent(max(shares))} of rows differ."
            head = (Column("column", each.name, "text"), Column("share", "differing", "percent"))
            way = f"by {each.name}"
            choices.append(Choice(f"layer {layer}, {way}", caption, spec, blocks, head, way))
    return Chart("layer", tuple(choices), "layer") if choices else None


def margins(report: Report) -> Chart | None:
    """Returns the score gap of the last chosen expert to the next, by layer, of rows where the choice differs and of
    the others."""
    colors = page_colors(("experts differ", "experts agree"))
    at_flips = [(each.layer, each.margin_at_flips) for each in report.layers]
    elsewhere = [(each.layer, each.margin_elsewhere) for each in report.layers]
    both = (
        _through("rows where experts differ", at_flips, colors["experts differ"]),
        _through("rows where they agree", elsewhere, colors["experts agree"]),
    )
    curves = [curve for curve in both if curve]
    if not curves:
        return None
    spec, blocks = lines(curves, LineStyle("MoE layer", "score margin", from_zero=True, height=240))
    means = "; ".join(f"{curve.name} {brief(sum(curve.ys) / len(curve.ys))}" for curve in curves)
    caption = f"Score of the last chosen expert less that of the next, mean over layers: {means}."
    head = (Column("series", "rows", "text"), Column("x", "MoE layer"), Column("y", "margin"))
    return Chart("margins", (Choice("margins", caption, spec, blocks, head),))


def layers_side_by_side(reports: Sequence[Named]) -> Chart | None:
    """Returns the share of differing rows by layer, a curve for each report."""
    colors = page_colors(name for name, _ in reports)
    curves = [
        Curve(name, [each.layer for each in report.layers], [each.differing for each in report.layers], colors[name])
        for name, report in reports
        if report.layers
    ]
    if not curves:
        return None
    spec, blocks = lines(curves, LineStyle("MoE layer", "rows with other experts", percent=True, height=260))
    said = "; ".join(f"{curve.name} {percent(float(np.mean(curve.ys)))}" for curve in curves)
    head = (Column("series", "report", "text"), Column("x", "MoE layer"), Column("y", "differing", "percent"))
    return Chart(
        "layers", (Choice("layers", f"Rows with other experts, mean over layers: {said}.", spec, blocks, head),)
    )


def histograms(report: Report) -> Chart | None:
    """Returns one drawing for each histogram; heights are shares of the series' rows."""
    choices = [_histogram_choice(each) for each in report.histograms if any(map(sum, each.counts.values()))]
    return Chart("histograms", tuple(choices), "histogram") if choices else None


def _histogram_choice(each: Histogram) -> Choice:
    bins = [f"{brief(low)} to {brief(high)}" for low, high in itertools.pairwise(each.edges)]
    there = {name: counts for name, counts in each.counts.items() if sum(counts)}
    blocks = tuple(
        {"series": name, "bin": bins, "count": [*counts], "share": short([count / sum(counts) for count in counts])}
        for name, counts in there.items()
    )
    rows = ", ".join(f"{name}: {sum(counts):,} rows" for name, counts in there.items())
    head = (Column("series", "series", "text"), Column("bin", each.name, "text"), Column("count", "rows"))
    head += (Column("share", "share", "percent"),)
    caption = f"Histogram of {each.name}; {rows}."
    return Choice(each.name, caption, grouped(each.name, [*there]), blocks, head)


def slices(report: Report) -> Chart | None:
    """Returns the gap of each kind of token with its interval, one drawing for each way to slice."""
    ways: dict[str, list[tuple[str, Interval]]] = {}
    for each in report.slices:
        if each.gap is not None:
            ways.setdefault(each.by, []).append((each.name, each.gap))
    choices = [_slice_choice(by, parts) for by, parts in ways.items()]
    return Chart("slices", tuple(choices), "slice by") if choices else None


def _slice_choice(by: str, parts: Sequence[tuple[str, Interval]]) -> Choice:
    spec = ranges("mean |d|, nats", len(parts))
    numbers = {key: short([getattr(gap, key) for _, gap in parts]) for key in ("value", "low", "high")}
    blocks = ({"name": [name for name, _ in parts], "series": "gap", **numbers},)
    name, largest = max(parts, key=lambda part: part[1].value)
    caption = f"Mean |d| by {by}: largest {brief(largest.value)} nats, {name}. Bars are 95% intervals."
    head = (Column("name", by, "text"), Column("value", "mean |d|"), Column("low", "low"), Column("high", "high"))
    return Choice(by, caption, spec, blocks, head)
