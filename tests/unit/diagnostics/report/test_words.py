"""No line of a page ends within a number, or between a number and its unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_samples import full_report
from report_texts import shown_texts

from moerl.diagnostics.report.compare import write_comparison
from moerl.diagnostics.report.page import write_report
from moerl.diagnostics.report.sweep import SweptRun, sweep_report, write_sweep_report
from moerl.diagnostics.report.words import table, unbroken
from moerl.telemetry.metrics import METRICS

BREAKS = re.compile(
    r"[0-9\]] (?:nats?|tokens?|steps?|versions?|ids?|rows?|layers?|rollouts?|runs?|responses?|s|GiB|MiB)\b"
    r"|[0-9]e-[0-9]"
)
"""A number that could end a line. Written here again, so that a unit that the code forgets fails."""


def breaks_of(page: Path) -> list[str]:
    return [text for text in shown_texts(page.read_text(encoding="utf-8")) if BREAKS.search(text)]


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("1.2e-02 nats", "1.2e-\u206002\u00a0nats"),
        ("5 steps of 12 tokens", "5\u00a0steps of 12\u00a0tokens"),
        ("0.01 [0.009, 0.02] nats", "0.01 [0.009, 0.02]\u00a0nats"),
        ("<strong>3</strong> tokens", "<strong>3</strong>\u00a0tokens"),
        ("40, the last", "40, the last"),
        ("7 stepsons and 5 s-curves", "7 stepsons and 5 s-curves"),
        ('<a href="3 runs/report.html">3 runs</a>', '<a href="3 runs/report.html">3\u00a0runs</a>'),
    ],
)
def test_a_number_and_its_unit_stay_on_one_line(text: str, joined: str) -> None:
    assert unbroken(text) == joined


@pytest.mark.parametrize("unit", sorted({metric.unit for metric in METRICS.values()} - {"1"}))
def test_every_unit_of_a_metric_is_known(unit: str) -> None:
    assert unbroken(f"2 {unit}") == f"2\u00a0{unit}"


def test_no_number_is_broken_on_any_page(tmp_path: Path) -> None:
    text = "1.2e-02 nats in 5 steps"
    write_report(full_report(text), tmp_path / "page.html")
    write_comparison([("one", full_report(text)), ("other", full_report())], tmp_path / "comparison.html")
    row = {"stage": "rl", "step": 1, "reward/mean": 1e-7, "mismatch/logprob_abs_mean": 2e-7}
    runs = [SweptRun(f"run-{seed}", {"seed": str(seed)}, "finished", [row]) for seed in (1, 2)]
    write_sweep_report(sweep_report("5 runs", ["seed"], runs), runs, tmp_path / "sweep.html")
    for name in ("page", "comparison", "sweep"):
        assert breaks_of(tmp_path / f"{name}.html") == [], name
    assert any("nats" in each for each in shown_texts((tmp_path / "page.html").read_text(encoding="utf-8")))


def test_a_page_without_the_joints_is_seen_to_break(tmp_path: Path) -> None:
    write_report(full_report("1.2e-02 nats"), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("\u00a0", " ").replace("\u2060", ""), encoding="utf-8")
    assert len(breaks_of(tmp_path / "page.html")) > 10


def test_numbers_that_scripts_write_are_joined_to_their_units() -> None:
    script = (Path(__file__).parents[4] / "moerl/diagnostics/report/assets/page.js").read_text()
    assert not re.search(r"\} (?:nats|ids|MoE layers)", script)
    assert 'toExponential(3).replace("-", "-\\u2060")' in script


def test_a_cell_says_its_column_where_there_is_no_room_for_a_head() -> None:
    made = table(
        ("figure", "both<br><span class='quiet'>all kept</span>", "trained<br><span></span>"), [["a", "1", "2"]]
    )
    assert re.findall(r'data-name="([^"]*)"', made) == ["figure", "both: all kept", "trained"]
