"""Alerts of a run, and its end: the report is written; one that cannot be is said, and the run is finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.diagnostics.report.data import read_report
from moerl.diagnostics.summary import RunSummary
from moerl.orchestration.evaluation import Evaluation
from moerl.orchestration.reporting import Reporter

SUMMARY = RunSummary("mine", 1, 1, 10, 1.0, 1, 0)
METRICS = {"mismatch/logprob_abs_mean": 0.001, "replay/rows_verified": 8.0}


def finish(run_dir: Path, stage: str = "rl") -> None:
    with Reporter(run_dir, "mine", tensorboard=False) as reporter:
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


def test_the_three_accuracies_before_the_first_step_say_which_is_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {
        "dev": Evaluation(256, 0.27, 20.3, {}),
        "cold_start": Evaluation(1000, 0.29, 20.1, {}),
        "cold_start_worked": Evaluation(1000, 0.66, 33.0, {}),
    }
    with Reporter(tmp_path, "mine", tensorboard=False) as reporter:
        reporter.evaluated(0, measured, {})
    assert capsys.readouterr().out.splitlines() == [
        "step 0: accuracy 0.270 (greedy, 256 dev problems, looked at while it trains), 20.3 tokens",
        "step 0: accuracy 0.290 (greedy, 1000 held-out problems, before RL), 20.1 tokens",
        "step 0: accuracy 0.660 (greedy, 1000 held-out problems, before RL, made to show its work), 33.0 tokens",
    ]


LIVE = "routing/live_rows"


def active(run_dir: Path) -> list[float]:
    return [json.loads(line)["alerts/active"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_an_alert_is_said_once_with_its_remedy_and_counted_in_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with Reporter(tmp_path, "a run", tensorboard=False) as reporter:
        for step, rows in enumerate((0.0, 4.0, 6.0, 0.0, 5.0), start=1):
            reporter.log("rl", step, {LIVE: rows})
    alerts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ALERT: ")]
    assert [alert.split(":")[1] for alert in alerts] == [" step 2", " step 5"]
    assert "`moerl conformance`" in alerts[0]
    assert active(tmp_path) == [0, 1, 1, 0, 1]


def test_a_run_that_goes_on_remembers_what_was_alarming(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Reporter(tmp_path, "a run", tensorboard=False) as reporter:
        for step, count in enumerate((0.0, 3.0, 3.0), start=1):
            reporter.log("rl", step, {"quarantine/count": count})
    assert "ALERT" in capsys.readouterr().out
    with Reporter(tmp_path, "a run", tensorboard=False) as reporter:
        reporter.rewind("rl", 2, evaluated=True)
        reporter.log("rl", 3, {"quarantine/count": 3.0})
    assert "ALERT" not in capsys.readouterr().out
    assert active(tmp_path) == [0, 1, 1]


def test_rows_of_other_stages_have_no_alerts(tmp_path: Path):
    with Reporter(tmp_path, "a run", tensorboard=False) as reporter:
        reporter.log("sft", 1, {"sft/loss": 1.0})
    assert "alerts/active" not in (tmp_path / "metrics.jsonl").read_text()
