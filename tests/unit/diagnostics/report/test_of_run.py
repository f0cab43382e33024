"""Reports of runs: parts of the gap, findings and the verdict, from rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from moerl.diagnostics.report.data import Finding, Report, encode_report
from moerl.diagnostics.report.of_run import MAX_STEPS, report_of_run
from moerl.diagnostics.report.run_findings import MIN_STEPS, RunSettings

KEPT = RunSettings("rollout", True)
TABLE = {"neither": 0.05, "kept_sets": 0.02, "experts": 0.035, "both": 0.004}


def row(step: int, gap: float = 0.004, **more: float) -> dict[str, Any]:
    metrics = {
        "mismatch/logprob_abs_mean": gap,
        "mismatch/share_above_ln2": 0.001,
        "mismatch/tokens_with_different_experts": 0.2,
        "replay/rows_verified": 1000.0,
        "replay/updates_unproved": 0.0,
        "routing/live_rows": 0.0,
        "quarantine/count": 0.0,
        "kept/size_mean": 7.5,
        "staleness/age_max": 0.0,
    }
    renamed = {name.replace("__", "/"): value for name, value in more.items()}
    return {"stage": "rl", "step": step, **metrics, **renamed}


def with_table(values: Mapping[str, Any], table: Mapping[str, float] = TABLE) -> dict[str, Any]:
    return {**values, **{f"mismatch/{scorer}/logprob_abs_mean": value for scorer, value in table.items()}}


def report_of(
    rows: list[dict[str, Any]], settings: RunSettings = KEPT, layers: list[dict[str, Any]] | None = None
) -> Report:
    report = report_of_run(rows, layers or [], ("a run", "somewhere"), settings)
    assert report is not None
    return report


def finding(report: Report, cause: str) -> Finding:
    return next(each for each in report.findings if each.cause == cause)


def test_a_run_without_a_step_of_reinforcement_learning_has_no_report() -> None:
    assert report_of_run([{"stage": "sft", "step": 1, "sft/loss": 1.0}], [], ("a run", ""), KEPT) is None


def test_the_gap_is_split_by_adding_each_guarantee_first_and_last() -> None:
    gap = report_of([with_table(row(1))]).decompositions[0]
    parts = {share.cause: share.nats.value for share in gap.shares}
    assert gap.name == "nothing kept"
    assert parts["routing"] == pytest.approx(((0.05 - 0.035) + (0.02 - 0.004)) / 2)
    assert parts["masks"] == pytest.approx(((0.05 - 0.02) + (0.035 - 0.004)) / 2)
    assert parts["unexplained"] == 0.004


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        (KEPT, 0.004),
        (RunSettings("off", True), 0.0195),
        (RunSettings("rollout", False), 0.0345),
        (RunSettings("off", False), 0.05),
    ],
)
def test_parts_add_up_to_each_gap(settings: RunSettings, trained: float) -> None:
    for gap in report_of([with_table(row(1, trained))], settings).decompositions:
        assert sum(share.nats.value for share in gap.shares) == pytest.approx(gap.total.value)
    as_trained = report_of([with_table(row(1, trained))], settings).decompositions[1]
    assert as_trained.name == "as trained"
    assert {share.cause for share in as_trained.shares} >= ({"routing"} if settings.routing == "off" else set())
    assert ("masks" in {share.cause for share in as_trained.shares}) is not settings.masks


def test_the_last_table_counts() -> None:
    rows = [with_table(row(1), {name: 10 * value for name, value in TABLE.items()}), with_table(row(2)), row(3)]
    report = report_of(rows)
    assert report.decompositions[0].total.value == 0.05
    assert report.scorers["neither"] == {"logprob_abs_mean": 0.05}
    assert any("those of step 2" in note for note in report.notes)


def test_without_a_table_the_page_says_why_nothing_is_split() -> None:
    report = report_of([row(1)])
    assert report.decompositions == ()
    assert set(report.scorers) == {"trained"}
    assert "mismatch.every" in report.notes[0]
    assert "mismatch.every=1" in report.verdict.advice


def test_a_run_that_kept_all_is_in_order() -> None:
    report = report_of([with_table(row(n)) for n in range(1, 4)])
    assert report.verdict.level == "good"
    assert (
        "log-probs differ by 0.004 nats on average as trained (healthy: below 0.02 nats), instead of 0.05"
        in report.verdict.text
    )
    assert {each.level for each in report.findings} == {"good"}
    assert {each.cause for each in report.findings} == {"routing", "masks"}


def test_routing_that_was_off_is_a_fault_of_the_size_of_its_part() -> None:
    rows = [with_table(row(n, 0.0195, replay__rows_verified=0.0)) for n in range(1, 4)]
    for settings in (RunSettings("off", True), RunSettings(None, True)):
        report = report_of(rows, settings)
        found = finding(report, "routing")
        assert (found.level, report.verdict.level) == ("fault", "fault")
        assert found.nats.value == pytest.approx(0.0155)
        assert found.share == pytest.approx(0.0155 / 0.05)
        assert report.verdict.advice == "Set keep_routing.mode=rollout."


def test_routing_that_was_off_and_made_nothing_is_a_note() -> None:
    table = {"neither": 0.004, "kept_sets": 0.004, "experts": 0.004, "both": 0.004}
    report = report_of([with_table(row(1, replay__rows_verified=0.0), table)], RunSettings("off", True))
    assert finding(report, "routing").level == "note"


def test_replay_of_the_trainers_own_routing_is_not_that_of_the_sampler() -> None:
    assert finding(report_of([with_table(row(1, 0.02))], RunSettings("trainer", True)), "routing").level == "fault"


def test_updates_without_a_proof_are_noted() -> None:
    found = finding(report_of([row(1, replay__updates_unproved=2.0)]), "routing")
    assert found.level == "note"
    assert "keep_routing.verify=every" in found.remedy


def test_masks_that_were_off_are_a_fault() -> None:
    found = finding(report_of([with_table(row(1, 0.0345))], RunSettings("rollout", False)), "masks")
    assert (found.level, found.share) == ("fault", pytest.approx(0.0305 / 0.05))


@pytest.mark.parametrize(("share", "level"), [(0.09, None), (0.11, "fault")])
def test_a_tenth_of_far_tokens_is_a_fault(share: float, level: str | None) -> None:
    findings = report_of([row(1, mismatch__share_above_ln2=share)]).findings
    found = [each.level for each in findings if each.cause == "far tokens"]
    assert found == ([level] if level else [])


@pytest.mark.parametrize(("name", "cause"), [("routing__live_rows", "coverage"), ("quarantine__count", "quarantine")])
def test_what_limits_a_run_is_noted(name: str, cause: str) -> None:
    assert finding(report_of([row(1), row(2, **{name: 3.0})]), cause).level == "note"
    assert cause not in {each.cause for each in report_of([row(1), row(2)]).findings}


@pytest.mark.parametrize("max_age", [3, None])
def test_an_age_that_the_configuration_allows_is_no_note(max_age: int | None) -> None:
    report = report_of([row(1), row(2, staleness__age_max=3.0)], replace(KEPT, max_age=max_age))
    assert finding(report, "age").level == "good"
    assert finding(report, "age").title == "Tokens are up to 3 versions old, which the configuration allows"
    assert report.verdict.level == "good"
    assert "age" not in {each.cause for each in report_of([row(1), row(2)]).findings}


def test_an_age_beyond_what_the_configuration_allows_is_noted() -> None:
    found = finding(report_of([row(1, staleness__age_max=3.0)], replace(KEPT, max_age=2)), "age")
    assert found.level == "note"
    assert found.evidence[-1].seen == "2 versions"


def test_reasons_of_the_quarantine_are_listed() -> None:
    report = report_of([row(1, quarantine__count=3.0)], replace(KEPT, quarantined={"wrong_shape": 3}))
    assert [(each.reason, each.count) for each in report.unusable] == [("wrong_shape", 3)]


@pytest.mark.parametrize(
    ("gaps", "level"),
    [
        ([0.011 + 0.0009 * n for n in range(30)], "fault"),
        ([0.005 + 0.0002 * n for n in range(30)], "note"),
        ([0.011 + 0.0009 * (n % 2) for n in range(30)], None),
        ([0.036 - 0.0009 * n for n in range(29)], None),
        ([1e-7 * (1 + n) for n in range(30)], None),
        ([0.011 * (1 + n) for n in range(MIN_STEPS - 1)], None),
    ],
    ids=["tripled", "risen", "level", "falling", "rounding", "too short to tell"],
)
def test_a_gap_that_rises_with_the_steps_is_found(gaps: list[float], level: str | None) -> None:
    report = report_of([row(step, gap) for step, gap in enumerate(gaps, start=1)])
    assert [each.level for each in report.findings if each.cause == "drift"] == ([level] if level else [])


@pytest.mark.parametrize(("gap", "level"), [(0.019, None), (0.05, "note"), (0.2, "fault")])
def test_a_gap_that_stays_large_is_found(gap: float, level: str | None) -> None:
    found = [each.level for each in report_of([row(1, gap)]).findings if each.cause == "gap"]
    assert found == ([level] if level else [])


def test_faults_come_before_notes_and_the_verdict_is_the_first() -> None:
    report = report_of([row(1, 0.05, staleness__age_max=2.0, mismatch__share_above_ln2=0.2)])
    assert [each.level for each in report.findings] == sorted(
        (each.level for each in report.findings), key=("fault", "note", "good").index
    )
    assert report.verdict.text.startswith("More than a tenth of the tokens")


def test_layers_are_means_over_steps_and_margins_weigh_steps_by_their_flips() -> None:
    layers = [
        {"stage": "rl", "step": 1, "disagreement": [0.1, 0.0], "jaccard": [0.9, 1.0], "margin_at_flips": [0.01, 0.0]}
        | {"margin_elsewhere": [0.2, 0.3], "live_rows": [0.0, 0.0]},
        {"stage": "rl", "step": 2, "disagreement": [0.3, 0.0], "jaccard": [0.7, 1.0], "margin_at_flips": [0.05, 0.0]}
        | {"margin_elsewhere": [0.4, 0.3], "live_rows": [0.0, 0.0]},
    ]
    first, second = report_of([row(1), row(2)], KEPT, layers).layers
    assert (first.differing, first.jaccard, first.margin_elsewhere) == pytest.approx((0.2, 0.8, 0.3))
    assert first.margin_at_flips == pytest.approx(0.04)
    assert (second.differing, second.margin_at_flips) == (0.0, None)
    (found,) = report_of([row(1), row(2)], KEPT, layers).maps
    assert (found.name, found.columns, found.differing) == ("step", ("1", "2"), ((0.1, 0.3), (0.0, 0.0)))


def test_times_and_memory_are_left_out_of_the_steps() -> None:
    (step,) = report_of([row(1, seconds__train=3.0, memory__peak_rss_bytes=1.0, reward__mean=0.5)]).steps
    assert "reward/mean" in step.metrics
    assert not [name for name in step.metrics if name.startswith(("seconds/", "memory/"))]


def test_the_report_of_a_long_run_stays_small_and_loses_no_spike() -> None:
    rows = [row(n, 0.9 if n == 1234 else 0.004) for n in range(1, 3001)]
    layers = [
        {"step": n} | {name: [0.1] * 24 for name in ("disagreement", "jaccard", "margin_at_flips", "margin_elsewhere")}
        for n in range(1, 3001)
    ]
    report = report_of(rows, layers=layers)
    by_step = {step.step: step.metrics.get("mismatch/logprob_abs_mean") for step in report.steps}
    assert by_step[1234] == 0.9
    assert {1, 3000} <= set(by_step)
    assert len(report.maps[0].columns) == MAX_STEPS
    assert report.maps[0].columns[0].startswith("1 to ")
    assert any("Of 3,000 steps" in note for note in report.notes)
    assert len(encode_report(report)) < 1_500_000


def test_a_gap_of_old_samples_is_not_blamed_on_the_engine() -> None:
    fresh = report_of([row(n, 0.07) for n in range(1, 4)])
    old = report_of([row(n, 0.07, staleness__age_max=2.0) for n in range(1, 4)])
    assert "moerl verify" in finding(fresh, "gap").remedy
    assert "what age makes of it" in finding(old, "gap").remedy
    assert any(each.seen == "2 versions" for each in finding(old, "gap").evidence)
