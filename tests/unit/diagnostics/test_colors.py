"""One meaning, one colour: in the charts of pages, in their tables and in PNGs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from report_samples import full_report

from moerl.diagnostics.causes.texts import CAUSES
from moerl.diagnostics.colors import MEANINGS, PALETTE, colors_of
from moerl.diagnostics.plots import CHARTS
from moerl.diagnostics.report import figures
from moerl.diagnostics.report.charts import COLORS, Chart, page_colors
from moerl.telemetry.metrics import SCORERS

STYLE = Path(__file__).parents[3] / "moerl/diagnostics/report/assets/page.css"


def colors_in(chart: Chart | None, choice: int = 0) -> dict[str, str]:
    assert chart is not None
    scale: dict[str, Any] = chart.choices[choice].spec["encoding"]["color"]["scale"]
    return dict(zip(scale["domain"], scale["range"], strict=True))


def choice_of(chart: Chart | None, label: str) -> int:
    assert chart is not None
    return [choice.label for choice in chart.choices].index(label)


def test_pages_have_the_palette_of_the_pngs() -> None:
    style = STYLE.read_text()
    assert tuple(re.findall(r"--c\d: light-dark\((#\w{6}),", style)) == PALETTE
    assert len(COLORS) == len(PALETTE) == len({*PALETTE})


def test_every_scorer_has_a_meaning_and_meanings_are_known() -> None:
    assert {*SCORERS} <= {*MEANINGS}
    assert {"routing", "masks", "unexplained", "precision", "staleness"} <= {*MEANINGS} & {*CAUSES}


def test_a_cause_keeps_its_colour_whatever_comes_before_it() -> None:
    assert colors_of(["masks"])["masks"] == colors_of(["routing", "precision", "masks"])["masks"] == MEANINGS["masks"]
    several = colors_of(["row_shift", "masks", "layer_shift"])
    assert len({*several.values()}) == 3
    assert colors_of(["row_shift", "layer_shift"])["row_shift"] == PALETTE[0]


def test_more_series_than_colours_begin_again() -> None:
    assert len(colors_of([f"run {n}" for n in range(20)])) == 20


def test_what_experts_make_has_one_colour_in_parts_scorers_and_margins() -> None:
    report = full_report()
    parts = colors_in(figures.decomposition([("", report)]))
    steps = figures.over_steps([("", report)])
    by_scorer = colors_in(steps, choice_of(steps, "Gap, mean |d|, by scorer"))
    own = page_colors(MEANINGS)
    assert parts["experts not kept"] == own["routing"] == own["kept_sets"]
    assert colors_in(figures.margins(report))["rows where experts differ"] == own["routing"]
    assert by_scorer == {"as trained": own["as trained"], SCORERS["neither"]: own["neither"]}
    alone = colors_in(steps, choice_of(steps, "mismatch/neither/logprob_abs_mean"))
    assert [*alone.values()] == [own["neither"]]


def test_a_report_keeps_its_colour_in_figures_that_not_all_have() -> None:
    reports = [("one", replace(full_report(), layers=())), ("other", full_report()), ("third", full_report())]
    steps = colors_in(figures.over_steps(reports), 1)
    layers = colors_in(figures.layers_side_by_side(reports))
    assert [*layers] == ["other", "third"]
    assert layers == {name: steps[name] for name in layers}


def test_pngs_have_the_colours_of_the_page() -> None:
    lines = {line.label: line.color for chart in CHARTS for line in chart.lines}
    assert lines["as trained"] == MEANINGS["as trained"]
    assert lines["nothing kept"] == MEANINGS["neither"]
    assert lines["routing and sampling mask kept"] == MEANINGS["both"]
    assert lines["sampled responses"] == lines["sampled, training problems"] == MEANINGS["sampled"]
    assert lines["greedy, dev problems"] == MEANINGS["evaluation"]


def test_turns_of_one_report_are_drawn_together_and_each_has_a_colour() -> None:
    steps = tuple(
        replace(step, metrics={f"turn/{turn}/tokens_mean": 4.0 + turn for turn in (1, 2, 3)})
        for step in full_report().steps
    )
    report = replace(full_report(), steps=steps)
    chart = figures.over_steps([("", report)])
    colors = colors_in(chart, choice_of(chart, "Sampled tokens, by turn"))
    assert [*colors] == ["turn 1", "turn 2", "turn 3"]
    assert len({*colors.values()}) == 3
    both = figures.over_steps([("one", report), ("other", report)])
    assert both is not None
    assert not [choice.label for choice in both.choices if "by turn" in choice.label]
