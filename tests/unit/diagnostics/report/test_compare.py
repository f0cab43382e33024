"""Reports side by side: the verdict says what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from report_samples import around, full_report

from moerl.diagnostics.report.compare import gap_of, verdict_of, write_comparison
from moerl.diagnostics.report.data import Decomposition, Report, Share, Verdict


def report_with(total: float, routing: float = 0.0) -> Report:
    shares = (Share("routing", "experts not kept", around(routing)), Share("rest", "the rest", around(total - routing)))
    good = Verdict("good", "In order.", "Nothing.")
    gap = Decomposition("as trained", around(total), shares)
    return replace(full_report(), verdict=good, findings=(), decompositions=(gap,))


def cut(report: Report, step: int) -> Report:
    """Returns the report of the run up to a step."""
    steps = tuple(each for each in report.steps if each.step <= step)
    return replace(report, steps=steps, decompositions=(Decomposition("as trained", around(0.001), ()),))


def test_reports_are_compared_by_the_gap_as_trained_where_there_is_one() -> None:
    nothing_kept = Decomposition("nothing kept", around(0.5), ())
    of_run = replace(full_report(), decompositions=(nothing_kept, *report_with(0.1).decompositions))
    assert gap_of(of_run) == ("as trained", 0.1)
    assert gap_of(full_report()) == ("as dumped", 0.017)
    without = replace(full_report(), decompositions=())
    assert gap_of(without) == ("as trained", 0.01 + 0.001 * 30)
    assert gap_of(replace(without, steps=())) is None


def test_a_gap_that_is_a_multiple_is_a_fault_and_its_part_is_named() -> None:
    worst = replace(report_with(0.03, 0.02), findings=full_report().findings)
    verdict = verdict_of([("one", report_with(0.01)), ("other", worst), ("third", report_with(0.012))])
    assert verdict.level == "fault"
    assert "The gap of other is 3.0 times that of one: mean |d| as trained is 0.03 against 0.01 nats" in verdict.text
    assert "most of the difference is in experts not kept" in verdict.text
    assert verdict.advice.startswith("Routes are shifted by one row")


def test_a_multiple_of_a_small_gap_is_a_note() -> None:
    assert verdict_of([("one", report_with(0.0004)), ("other", report_with(0.0018))]).level == "note"


def test_reports_that_agree_need_no_change() -> None:
    assert verdict_of([("one", report_with(0.02)), ("other", report_with(0.0205))]).level == "good"
    assert verdict_of([("one", report_with(1e-7)), ("other", report_with(9e-7))]).level == "good"


def test_two_reports_with_a_fault_are_no_agreement() -> None:
    fault = Verdict("fault", "Routes are 1 layer too late.", "Map routes by layer.")
    both = [(name, replace(report_with(0.02), verdict=fault)) for name in ("one", "other")]
    verdict = verdict_of(both)
    assert (verdict.level, verdict.advice) == ("fault", fault.advice)
    assert verdict.text.endswith("But all have a fault: Routes are 1 layer too late.")
    verdict = verdict_of([both[0], ("other", report_with(0.02))])
    assert verdict.level == "fault"
    assert "But one has a fault" in verdict.text


def test_a_run_beside_itself_cut_short_agrees_over_the_steps_that_both_have() -> None:
    whole = report_with(0.04)
    assert len(whole.steps) > 3
    half = whole.steps[len(whole.steps) // 2].step
    verdict = verdict_of([("whole", whole), ("cut", cut(whole, half))])
    assert verdict.level == "good", verdict.text
    assert f"to {half}" in verdict.text


def test_reports_without_a_gap_cannot_be_compared_and_it_is_said() -> None:
    empty = replace(full_report(), decompositions=(), steps=())
    assert verdict_of([("one", empty), ("other", report_with(0.1))]).text.startswith("Fewer than two")


def test_a_page_of_three_holds_the_figures_of_each(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    reports = [(name, report_with(total)) for name, total in (("one", 0.011), ("<b>", 0.022), ("third", 0.033))]
    write_comparison(reports, path)
    text = path.read_text()
    assert "<b>" not in text.split("<script")[0].replace("&lt;b&gt;", "")
    assert all(f"<strong>{total} [" in text for total in ("0.011", "0.022", "0.033"))
    assert '"series":"third"' in text
