"""Checks of every page of a report of a real run or dump, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Page, chromium, find_chromium

from moerl.diagnostics.report.data import Report, read_report

MAX_PAGE_BYTES = 5_000_000
needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"
)
_UNDRAWN = """[...document.querySelectorAll('figure[data-chart]')].filter(figure =>
    figure.querySelectorAll('svg path, svg rect').length <= 3).map(figure => figure.dataset.chart)"""
_CHARTS = "[...document.querySelectorAll('figure[data-chart]')].map(figure => figure.dataset.chart)"


def opened(path: Path, profile: Path) -> tuple[list[str], str]:
    """Names of the page's charts and its verdict, after it was opened in both schemes and on paper: every chart is
    drawn, nothing is asked for, no message appears."""
    assert path.stat().st_size <= MAX_PAGE_BYTES
    with chromium(profile) as page:
        page.size(1200, 900)
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            page.open(path)
            _check(page)
        page.pdf(profile / "page.pdf")
        _check(page)
        assert page.evaluate("[...document.querySelectorAll('figure svg, figure canvas')].length") > 0
        charts = page.evaluate(_CHARTS)
        verdict = page.evaluate("document.querySelector('.verdict .text').textContent")
    # On a page numbers keep their exponents and units on one line.
    return charts, verdict.replace("\N{NO-BREAK SPACE}", " ").replace("\N{WORD JOINER}", "")


def report_of_page(path: Path, profile: Path) -> Report:
    """The `report.json` beside a page that opens well (`opened`) and says the same verdict and the same total."""
    charts, verdict = opened(path, profile)
    report = read_report(path.with_suffix(".json"))
    assert verdict == report.verdict.text, (verdict, report.verdict.text)
    assert "steps" in charts or "slices" in charts
    for each in report.decompositions:
        parts = sum(share.nats.value for share in each.shares)
        assert parts == pytest.approx(each.total.value, abs=1e-9)
    return report


def _check(page: Page) -> None:
    assert page.evaluate(_UNDRAWN) == []
    assert not page.log, page.log
    assert not page.requests, page.requests
