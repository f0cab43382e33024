"""Figures of others: each with its source, on the page and in the documentation, beside figures of the same measure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_samples import full_report

from moerl.diagnostics.published import MEASURES, PUBLISHED, Published
from moerl.diagnostics.report.data import Report, Verdict
from moerl.diagnostics.report.definitions import title_of
from moerl.diagnostics.report.sections import published

DOCS = Path(__file__).parents[3] / "docs" / "routing_mismatch.md"


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda each: f"{each.measure} {each.value}")
def test_each_figure_has_a_source_and_stands_in_the_documentation(figure: Published) -> None:
    assert re.fullmatch(r"https://(arxiv\.org|github\.com)/\S+", figure.source)
    assert title_of(f"mismatch/{figure.measure}", "")
    (row,) = [line for line in DOCS.read_text().splitlines() if line.startswith("|") and figure.setting in line]
    measure, value, _, source = (cell.strip() for cell in row.strip("|").split("|"))
    assert measure == {"k3": "KL, k3", "logprob_abs_mean": "mean abs. d, nats"}[figure.measure]
    assert float(value) == figure.value
    assert figure.source in source


def test_a_report_shows_its_own_figures_above_those_of_the_same_measure() -> None:
    report = Report("", "", Verdict("good", "", ""), (), scorers={"both": {"k3": 3e-4, "logprob_abs_mean": 0.0125}})
    rows = re.findall(r"<tr>(<th scope=\"row\".*?)</tr>", published(report))
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert [row[0] for row in cells] == sorted((row[0] for row in cells), key=list(MEASURES.values()).index)
    assert cells[0] == ["KL, k3", "0.0003", "<strong>this report: both</strong>", ""]
    assert ["mean |d|, nats", "0.0125", "<strong>this report: both</strong>", ""] in cells
    assert len(cells) == 2 + len(PUBLISHED)
    assert "Compare k3 with k3" in published(report)


def test_a_report_without_these_measures_shows_none_of_them() -> None:
    report = Report("", "", Verdict("good", "", ""), (), scorers={"floor": {"logprob_abs_mean": 0.01}})
    assert published(report) == ""
    assert published(full_report())
