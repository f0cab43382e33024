"""A sweep's page: numbers by setting, verdicts, curves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from report_samples import HOSTILE

from moerl.diagnostics.report.sweep import SweepReport, SweptRun, sweep_report, write_sweep_report

KEYS = ["seed", "keep_routing.mode"]


def run(seed: int, mode: str, reward: float, state: str = "finished", steps: int = 20) -> SweptRun:
    rows = [
        {"stage": "rl", "step": step, "reward/mean": reward * step / steps, "mismatch/logprob_abs_mean": 1e-3}
        for step in range(1, steps + 1)
    ]
    return SweptRun(f"{seed}-{mode}", {"seed": str(seed), "keep_routing.mode": mode}, state, rows, reward)


def report(*runs: SweptRun) -> SweepReport:
    return sweep_report("Sweep", KEYS, runs)


def test_final_numbers_are_means_and_ranges_over_seeds() -> None:
    found = report(run(1, "off", 0.2), run(1, "rollout", 0.6), run(2, "off", 0.4), run(2, "rollout", 0.8))
    assert [each.label for each in found.settings] == ["keep_routing.mode=off", "keep_routing.mode=rollout"]
    rewards = [each.finals["reward/mean"] for each in found.settings]
    # Of 20 steps the last two count: 0.975 of the last reward.
    assert [(each.mean, each.low, each.high, each.runs) for each in rewards] == [
        (pytest.approx(0.975 * mean), pytest.approx(0.975 * low), pytest.approx(0.975 * high), 2)
        for mean, low, high in ((0.3, 0.2, 0.4), (0.7, 0.6, 0.8))
    ]
    assert found.settings[0].finals["held-out accuracy"].mean == pytest.approx(0.3)


def test_a_setting_whose_range_lies_above_the_others_is_recommended() -> None:
    found = report(run(1, "off", 0.2), run(1, "rollout", 0.6), run(2, "off", 0.4), run(2, "rollout", 0.8)).verdict
    assert found.level == "good"
    assert found.advice == "Take keep_routing.mode=rollout."


def test_settings_whose_ranges_overlap_are_not_told_apart() -> None:
    found = report(run(1, "off", 0.2), run(1, "rollout", 0.3), run(2, "off", 0.4), run(2, "rollout", 0.8)).verdict
    assert (found.level, found.advice) == ("note", "Add seeds before you choose.")


def test_one_seed_of_each_is_not_enough() -> None:
    assert report(run(1, "off", 0.2), run(1, "rollout", 0.8)).verdict.level == "note"


def test_runs_that_failed_are_named_and_do_not_count() -> None:
    found = report(run(1, "off", 0.2), run(2, "off", 9.0, "failed", steps=3), run(1, "rollout", 0.5))
    assert found.verdict.level == "fault"
    assert "1 of 3 runs failed: 2-off" in found.verdict.text
    assert found.settings[0].finals["reward/mean"].runs == 1
    assert found.settings[0].finals["reward/mean"].high < 1.0


def test_runs_that_are_under_way_are_counted() -> None:
    found = report(run(1, "off", 0.2), run(1, "rollout", 0.5, "running", steps=0)).verdict
    assert found.level == "note"
    assert found.text.startswith("1 of 2 runs are not finished.")


def test_a_sweep_over_seeds_alone_is_one_setting() -> None:
    found = sweep_report("Sweep", ["seed"], [run(1, "off", 0.2), run(2, "off", 0.4)])
    assert [each.label for each in found.settings] == ["all runs"]
    assert found.verdict.level == "good"
    assert "0.29 (0.2 to 0.39 over 2 runs), of all runs" in found.verdict.text


def test_the_page_and_its_numbers_are_written(tmp_path: Path) -> None:
    runs = [run(seed, mode, 0.1 * seed) for seed in (1, 2) for mode in ("off", "rollout")]
    found = report(*runs)
    write_sweep_report(found, runs, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert '<section id="finals">' in page
    assert "reward/mean, by keep_routing.mode" in page
    assert "reward/mean, by seed" in page
    assert "mismatch/logprob_abs_mean, each run" in page
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=SweepReport) == found


def test_a_sweep_without_a_step_has_a_page(tmp_path: Path) -> None:
    runs = [run(1, "off", 0.0, "failed", steps=0)]
    write_sweep_report(report(*runs), runs, tmp_path / "report.html")
    assert '<section id="runs">' in (tmp_path / "report.html").read_text()


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    runs = [run(1, "off", 0.5, steps=20_000)]
    write_sweep_report(report(*runs), runs, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_others_are_no_markup(text: str, tmp_path: Path) -> None:
    hostile = SweptRun(text, {"seed": "1", "keep_routing.mode": text}, "finished", run(1, "x", 0.5).rows, 0.5, text)
    write_sweep_report(report(hostile), [hostile], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "onerror=" not in page.replace("&quot;", '"').split("<section")[0]
