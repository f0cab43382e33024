"""The pages that people open: reports of real runs, compared and diagnosed, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from moerl_runs import DoneRun, Runs, rows
from report_pages import needs_chromium, opened, report_of_page

from moerl.diagnostics.report.data import Report
from moerl.telemetry.metrics import SCORERS

pytestmark = [pytest.mark.slow, needs_chromium, pytest.mark.xdist_group("chromium")]
GAP = "logprob_abs_mean"
# bfloat16 against float32: the sampler's router and the trainer's pick other experts.
ROUNDED = ("recipe=tiny", "rollout.dtype=bfloat16", "mismatch.every=1", "rl.steps=6", "optimizer.lr=1e-3")


def train(forked: Runs, folder: Path, *overrides: str) -> Path:
    finished = forked.run("train", *ROUNDED, f"run_dir='{folder}'", *overrides)
    assert finished.status == 0, finished.output
    return folder


@pytest.fixture(scope="module")
def kept(forked: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(forked, tmp_path_factory.mktemp("kept") / "kept")


@pytest.fixture(scope="module")
def off(forked: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ("keep_routing.mode=off", "keep_sampling_mask.enabled=false")
    return train(forked, tmp_path_factory.mktemp("off") / "off", *settings)


def require_numbers_of_metrics(report: Report, run: Path) -> None:
    """The page's numbers are those of the last row with a mismatch table."""
    last = [row for row in rows(run) if f"mismatch/neither/{GAP}" in row][-1]
    for scorer in SCORERS:
        assert report.scorers[scorer][GAP] == last[f"mismatch/{scorer}/{GAP}"]
    assert report.decompositions[0].total.value == last[f"mismatch/neither/{GAP}"]


def test_the_report_of_a_run_that_kept_both_is_in_order(kept: Path, tmp_path: Path) -> None:
    report = report_of_page(kept / "report.html", tmp_path / "profile")
    require_numbers_of_metrics(report, kept)
    assert report.verdict.level == "good", report.verdict
    assert report.maps
    assert [each.step for each in report.steps] == list(range(7))  # the first evaluation comes before any step


def test_the_report_of_a_run_that_kept_neither_says_so_and_how_much(off: Path, tmp_path: Path) -> None:
    report = report_of_page(off / "report.html", tmp_path / "profile")
    require_numbers_of_metrics(report, off)
    assert report.verdict.level == "fault", report.verdict
    assert {"routing", "masks"} <= {each.cause for each in report.findings if each.level != "good"}
    trained = next(each for each in report.decompositions if each.name == "as trained")
    assert {share.cause for share in trained.shares} >= {"routing", "masks"}


def test_a_comparison_of_both_names_the_larger_gap_and_its_remedy(
    forked: Runs, kept: Path, off: Path, tmp_path: Path
) -> None:
    page = tmp_path / "both.html"
    finished = forked.run("report", "--compare", str(kept), str(off), "--output", str(page))
    assert finished.status == 0, finished.output
    charts, verdict = opened(page, tmp_path / "profile")
    assert {"decomposition", "steps"} <= {*charts}
    assert verdict in finished.output
    assert "off" in verdict


def test_the_report_of_a_stale_run_shows_the_age_of_its_samples(forked: Runs, tmp_path: Path) -> None:
    run = train(forked, tmp_path / "stale", "rollout.placement=process", "buffer.max_staleness=1")
    report = report_of_page(run / "report.html", tmp_path / "profile")
    require_numbers_of_metrics(report, run)
    ages = [each.metrics["staleness/age_max"] for each in report.steps if each.step]
    assert max(ages) == 1
    assert "age" in {each.cause for each in report.findings}
    assert any(cause == "Largest staleness" and value == "1" for cause, value in report.facts)


def test_a_diagnosis_of_its_rollouts_opens_with_strips_and_slices(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    page = tmp_path / "diagnosis.html"
    model = tiny.folder / "cold_start"
    dump = tiny.folder / "rollouts" / "step-000001.parquet"
    finished = forked.run("diagnose", str(dump), "--model", f"{model}@0", "--output", str(page))
    assert finished.status == 0, finished.output
    report = report_of_page(page, tmp_path / "profile")
    assert report.verdict.level == "good", report.verdict
    assert report.strips
    assert {"decomposition", "maps", "slices"} <= {*opened(page, tmp_path / "again")[0]}
