"""Alerts in a run's console and rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.orchestration.reporting import RunReporter

LIVE = "routing/live_rows"


def active(run_dir: Path) -> list[float]:
    return [json.loads(line)["alerts/active"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_an_alert_is_said_once_with_its_remedy_and_counted_in_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with RunReporter(tmp_path, "a run", tensorboard=False) as reporter:
        for step, rows in enumerate((0.0, 4.0, 6.0, 0.0, 5.0), start=1):
            reporter.log("rl", step, {LIVE: rows})
    alerts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ALERT: ")]
    assert [alert.split(":")[1] for alert in alerts] == [" step 2", " step 5"]
    assert "`moerl conformance`" in alerts[0]
    assert active(tmp_path) == [0, 1, 1, 0, 1]


def test_a_run_that_goes_on_remembers_what_was_alarming(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunReporter(tmp_path, "a run", tensorboard=False) as reporter:
        for step, count in enumerate((0.0, 3.0, 3.0), start=1):
            reporter.log("rl", step, {"quarantine/count": count})
    assert "ALERT" in capsys.readouterr().out
    with RunReporter(tmp_path, "a run", tensorboard=False) as reporter:
        reporter.rewind("rl", 2, evaluated=True)
        reporter.log("rl", 3, {"quarantine/count": 3.0})
    assert "ALERT" not in capsys.readouterr().out
    assert active(tmp_path) == [0, 1, 1]


def test_rows_of_other_stages_have_no_alerts(tmp_path: Path):
    with RunReporter(tmp_path, "a run", tensorboard=False) as reporter:
        reporter.log("sft", 1, {"sft/loss": 1.0})
    assert "alerts/active" not in (tmp_path / "metrics.jsonl").read_text()
