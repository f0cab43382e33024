"""Runs of a sweep on one page: curves and final numbers by swept key, with mean and range over seeds. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from moerl.contract.files import atomic_file
from moerl.diagnostics.report import sections
from moerl.diagnostics.report.charts import (
    MAX_POINTS,
    Chart,
    Choice,
    Column,
    page_colors,
    points_of,
    series_colors,
    short,
    steps_axis,
    tooltip,
)
from moerl.diagnostics.report.data import Verdict, encode_report
from moerl.diagnostics.report.page import write_html
from moerl.diagnostics.report.sections import PageSection, figure
from moerl.diagnostics.report.words import brief, escaped, number, table
from moerl.telemetry.metrics import METRICS

SCHEMA = "moerl-sweep-report-1"
SEED = "seed"
FINAL_SHARE = 0.1
"""Part of a run's steps, the last ones, whose mean is a final number; one step at least."""
REWARD, ACCURACY = "reward/mean", "held-out accuracy"
_REWARDS = (REWARD, "accuracy/mean", "response/length_mean")
_MISMATCHES = ("mismatch/logprob_abs_mean", "mismatch/share_above_ln2", "mismatch/k3", "routing/disagreement")
_FINALS = {
    REWARD: "reward",
    ACCURACY: ACCURACY,
    "response/length_mean": "response length, tokens",
    "mismatch/logprob_abs_mean": "gap, mean |d|, nats",
    "mismatch/share_above_ln2": "extreme tokens, F(2)",
}
"""Final numbers, and their names in a table."""
_LONG_LABEL = 30


@dataclass(frozen=True, slots=True)
class SweptRun:
    """One run of a sweep."""

    name: str
    """Name of the run in the sweep."""
    values: Mapping[str, str]
    """By swept key, as on a command line."""
    state: str
    """State that the sweep reports, such as "finished" or "failed"."""
    rows: Sequence[Mapping[str, Any]]
    """Rows of reinforcement learning, by step."""
    accuracy: float | None = None
    """On held-out problems, in [0, 1]; None before the end."""
    page: str = ""
    """Page of the run, relative to that of the sweep; empty if there is none."""

    def final(self, metric: str) -> float | None:
        """Returns the final number of a metric, None without one."""
        if metric == ACCURACY:
            return self.accuracy
        found = [float(row[metric]) for row in self.rows if metric in row]
        return fmean(found[-max(1, round(FINAL_SHARE * len(found))) :]) if found else None


class Spread(msgspec.Struct, frozen=True):
    """A number over runs that differ in their seed alone."""

    mean: float
    """Mean over the runs."""
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    runs: int
    """Finished runs that have the number."""


class Setting(msgspec.Struct, frozen=True):
    """Runs with the same values of all keys but the seed."""

    values: dict[str, str]
    """Values by key, without the seed, as on a command line."""
    runs: list[str]
    """Names of the runs."""
    finals: dict[str, Spread] = field(default_factory=dict[str, Spread])
    """Final numbers by metric, of metrics that finished runs have."""

    @property
    def label(self) -> str:
        """Its values as on a command line."""
        return _label(self.values)


class SweepReport(msgspec.Struct, frozen=True):
    """The numbers of the page of a sweep."""

    title: str
    """Title of the page."""
    keys: list[str]
    """Swept keys, the seed among them if it is swept."""
    settings: list[Setting]
    """In the order of the sweep."""
    states: dict[str, str]
    """States of runs, by name."""
    verdict: Verdict
    """Box on top."""
    schema: str = SCHEMA
    """Version of this schema."""


def sweep_report(title: str, keys: Sequence[str], runs: Sequence[SweptRun]) -> SweepReport:
    """Returns the numbers of a sweep."""
    settings = [
        Setting(values, [run.name for run in members], {m: s for m in _FINALS if (s := spread(members, m))})
        for values, members in _groups(runs, [key for key in keys if key != SEED])
    ]
    return SweepReport(title, [*keys], settings, {run.name: run.state for run in runs}, verdict_of(settings, runs))


def write_sweep_report(report: SweepReport, runs: Sequence[SweptRun], page: Path) -> None:
    """Writes the page, and its numbers as JSON next to it. Raises `OSError` if it cannot."""
    with atomic_file(page.with_suffix(".json")) as partial:
        partial.write_bytes(encode_report(report))
    parts = (
        _finals(report),
        _curves("reward", "Reward", _REWARDS, report.keys, runs),
        _curves("mismatch", "Mismatch", _MISMATCHES, report.keys, runs),
        _runs(report.keys, runs),
    )
    over = f"{len(runs)} runs over {', '.join(report.keys)}"
    write_html(page, (report.title, over), (sections.verdict_box(report.verdict), ""), [part for part in parts if part])


def spread(runs: Sequence[SweptRun], metric: str) -> Spread | None:
    """Returns mean and range of a final number over finished runs; None if none has it."""
    ended = [run for run in runs if run.state == "finished"]
    found = [value for run in ended if (value := run.final(metric)) is not None]
    return Spread(fmean(found), min(found), max(found), len(found)) if found else None


def verdict_of(settings: Sequence[Setting], runs: Sequence[SweptRun]) -> Verdict:
    """Names the setting with the highest final reward, and whether its range lies above those of the others."""
    open_runs = [run for run in runs if run.state != "finished"]
    failed = [run.name for run in open_runs if run.state == "failed"]
    rewards = sorted(
        ((each.label, each.finals[REWARD]) for each in settings if REWARD in each.finals),
        key=lambda each: -each[1].mean,
    )
    if failed:
        text = f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. "
        return Verdict("fault", text + _leader(rewards), "Read the logs of these runs, and go on with the sweep.")
    if open_runs:
        text = f"{len(open_runs)} of {len(runs)} runs are not finished. "
        return Verdict("note", text + _leader(rewards), "Go on with the sweep.")
    is_clear = all(other.high < rewards[0][1].low for _, other in rewards[1:])
    if len(rewards) > 1 and not (is_clear and all(each.runs > 1 for _, each in rewards)):
        more = "Ranges over seeds overlap, or there are too few of them. "
        return Verdict("note", more + _leader(rewards), "Add seeds before you choose.")
    advice = f"Take {rewards[0][0]}." if len(rewards) > 1 else "Sweep a key besides the seed to compare settings."
    return Verdict("good", _leader(rewards), advice)


def _label(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "all runs"


def _leader(rewards: Sequence[tuple[str, Spread]]) -> str:
    if not rewards:
        return "No run that is finished has a reward."
    (label, best), *others = rewards
    text = f"The highest final reward is {_said(best)}, of {label}"
    return f"{text}; the next is {_said(others[0][1])}, of {others[0][0]}." if others else f"{text}."


def _said(value: Spread) -> str:
    if value.runs == 1:
        return brief(value.mean)
    return f"{brief(value.mean)} ({brief(value.low)} to {brief(value.high)} over {value.runs} runs)"


def _groups(runs: Sequence[SweptRun], keys: Sequence[str]) -> list[tuple[dict[str, str], list[SweptRun]]]:
    """Returns runs with the same values of these keys, in the order of the sweep."""
    found: dict[tuple[str, ...], list[SweptRun]] = {}
    for run in runs:
        found.setdefault(tuple(run.values[key] for key in keys), []).append(run)
    return [(dict(zip(keys, values, strict=True)), members) for values, members in found.items()]


def _finals(report: SweepReport) -> PageSection | None:
    metrics = [metric for metric in _FINALS if any(metric in each.finals for each in report.settings)]
    if not metrics:
        return None
    rows = [
        [escaped(each.label), _count(each, report), *(_cell(each.finals.get(metric)) for metric in metrics)]
        for each in report.settings
    ]
    lead = (
        f'<p class="lead">Mean of the last {FINAL_SHARE:.0%} of steps of each finished run, one at least; then mean'
        " over seeds, and [smallest, largest].</p>"
    )
    head = ("setting", "runs", *(escaped(_FINALS[metric]) for metric in metrics))
    return PageSection("finals", "Final numbers", lead + table(head, rows))


def _count(setting: Setting, report: SweepReport) -> str:
    finished = sum(report.states[name] == "finished" for name in setting.runs)
    return str(finished) if finished == len(setting.runs) else f"{finished} of {len(setting.runs)}"


def _cell(value: Spread | None) -> str:
    if value is None:
        return "-"
    return number(value.mean) + (f" [{number(value.low)}, {number(value.high)}]" if value.runs > 1 else "")


def _runs(keys: Sequence[str], runs: Sequence[SweptRun]) -> PageSection:
    rows = [
        [
            f'<a href="{escaped(run.page)}">{escaped(run.name)}</a>' if run.page else escaped(run.name),
            *(escaped(run.values[key]) for key in keys),
            escaped(run.state),
            str(len(run.rows)),
            *("-" if (v := run.final(metric)) is None else number(v) for metric in (REWARD, ACCURACY)),
        ]
        for run in runs
    ]
    head = ("run", *map(escaped, keys), "state", "steps", _FINALS[REWARD], ACCURACY)
    return PageSection("runs", "Runs", table(head, rows, texts=2 + len(keys)))


def _curves(
    name: str, title: str, metrics: Sequence[str], keys: Sequence[str], runs: Sequence[SweptRun]
) -> PageSection | None:
    """Returns means over steps by the values of each swept key, and by setting, with the range over runs."""
    ways = [(f"by {key}", [key]) for key in sorted(keys, key=lambda key: key == SEED)]
    others = [key for key in keys if key != SEED]
    if len(others) > 1:
        ways.insert(0, ("by setting", others))
    if len(keys) > 1:
        ways.append(("each run", [*keys]))
    choices = [choice for metric in metrics for how, by in ways if (choice := _choice(metric, how, _groups(runs, by)))]
    if not choices:
        return None
    chart = Chart(name, tuple(choices), "curves")
    return PageSection(name, title, figure(chart), (chart,))


def _choice(metric: str, how: str, groups: Sequence[tuple[Mapping[str, str], Sequence[SweptRun]]]) -> Choice | None:
    bands = [(_label(values), band) for values, members in groups if (band := _band(members, metric))]
    if not bands:
        return None
    unit = METRICS[metric].unit if metric in METRICS else ""
    y_title = metric if unit in ("", "1") else f"{metric}, {unit}"
    colors = page_colors(_label(values) for values, _ in groups)
    spec = _spec({each: colors[each] for each, _ in bands}, y_title, [band for _, band in bands])
    blocks = tuple(
        {"series": each, "x": short(xs), "y": short(means), "low": short(lows), "high": short(highs)}
        for each, (xs, means, lows, highs) in bands
    )
    said = "; ".join(f"{each} {brief(band[1][0])} at first, {brief(band[1][-1])} at last" for each, band in bands)
    caption = f"{metric} {how}, mean and range over the runs that have the step: {said}."
    columns = (Column("series", "runs", "text"), Column("x", "step"), Column("y", "mean"))
    columns += (Column("low", "low"), Column("high", "high"))
    return Choice(f"{metric}, {how}", caption, spec, blocks, columns, metric)


_Band = tuple[list[float], list[float], list[float], list[float]]
"""Steps, means, smallest and largest values."""


def _band(runs: Sequence[SweptRun], metric: str) -> _Band | None:
    values: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rows:
            if metric in row:
                values.setdefault(int(row["step"]), []).append(float(row[metric]))
    if not values:
        return None
    steps = sorted(values)
    if len(steps) > MAX_POINTS:
        steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, MAX_POINTS).astype(int))]
    at = [values[step] for step in steps]
    return [*map(float, steps)], [fmean(v) for v in at], [min(v) for v in at], [max(v) for v in at]


def _spec(colors: Mapping[str, str], y_title: str, bands: Sequence[_Band]) -> dict[str, Any]:
    """Returns lines, and the areas between the smallest and the largest run; rows: series, x, y, low, high.

    colors: by series.
    """
    columns = 2 if max(map(len, colors)) > _LONG_LABEL else 4
    legend = {"title": None, "symbolType": "stroke", "symbolSize": 260, "symbolOpacity": 1, "symbolStrokeWidth": 3}
    legend |= {"columns": {"signal": f"width < 560 ? 1 : {columns}"}}
    lowest, highest = min(min(band[2]) for band in bands), max(max(band[3]) for band in bands)
    is_log = lowest > 0.0 and highest > 20.0 * lowest
    numbers = (("y", "mean", ".4~g"), ("low", "low", ".4~g"), ("high", "high", ".4~g"))
    y = {"type": "quantitative", "title": y_title}
    y |= {"scale": {"type": "log"} if is_log else {"zero": False}, "axis": {"format": ".1e" if is_log else ".3~g"}}
    point = points_of(max(len(band[0]) for band in bands))
    return {
        "width": "container",
        "height": 300,
        "encoding": {
            "x": steps_axis("step"),
            "color": series_colors(colors, legend if len(colors) > 1 else None),
            "tooltip": tooltip(("series", "runs"), ("x", "step"), *numbers),
        },
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.16},
                "encoding": {"y": y | {"field": "low"}, "y2": {"field": "high"}},
            },
            {"mark": {"type": "line", "point": point}, "encoding": {"y": y | {"field": "y"}}},
        ],
    }
