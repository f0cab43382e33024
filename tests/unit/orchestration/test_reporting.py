"""The end of a run: its report is written, and one that cannot be is said, while the run stays a finished one."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.diagnostics.report.data import read_report
from moerl.diagnostics.summary import RunSummary
from moerl.orchestration.reporting import RunReporter

SUMMARY = RunSummary("mine", 1, 1, 10, 1.0, 1, 0)
METRICS = {"mismatch/logprob_abs_mean": 0.001, "replay/rows_verified": 8.0}


def finish(run_dir: Path, stage: str = "rl") -> None:
    with RunReporter(run_dir, "mine", tensorboard=False) as reporter:
        reporter.log(stage, 1, METRICS)
        reporter.finish(SUMMARY)


def test_a_run_that_ends_leaves_its_report_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(tmp_path)
    out = capsys.readouterr().out
    assert f"report: {tmp_path / 'report.html'}" in out
    assert read_report(tmp_path / "report.json").verdict.text in out
    assert (tmp_path / "report.html").stat().st_size > 800_000


def test_a_cold_start_alone_has_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(tmp_path, "sft")
    assert "report" not in capsys.readouterr().out
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_is_said_and_the_run_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").mkdir()
    finish(tmp_path)
    out = capsys.readouterr().out
    assert "note: no report was written: cannot write" in out
    assert f"write it later: moerl report {tmp_path}" in out
    assert (tmp_path / "summary.json").exists()


def test_a_configuration_that_cannot_be_read_is_said_and_the_run_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("recipe: [")
    finish(tmp_path)
    assert "note: no report was written" in capsys.readouterr().out
    assert (tmp_path / "summary.json").exists()
