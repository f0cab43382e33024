"""Curves from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.diagnostics.plots import CHARTS, draw_curves
from moerl.telemetry.metrics import METRICS
from moerl.telemetry.sinks import JsonlSink

PNG = b"\x89PNG\r\n\x1a\n"


def write(path: Path, rows: list[tuple[str, int, dict[str, float]]]) -> Path:
    sink = JsonlSink(path)
    for row in rows:
        sink.write(*row)
    sink.close()
    return path


def test_every_curve_shows_a_registered_metric():
    for chart in CHARTS:
        assert all(line.metric in METRICS for line in chart.lines)


@pytest.mark.parametrize("mismatch", [1e-3, 0.0])
def test_a_run_gets_an_overview_and_one_file_per_chart(tmp_path: Path, mismatch: float):
    rows: list[tuple[str, int, dict[str, float]]] = [("evaluation", 0, {"accuracy/mean": 0.4})]
    for step in range(1, 4):
        metrics = {"reward/mean": -0.1, "accuracy/mean": 0.5, "response/length_mean": 20.0}
        rows.append(("rl", step, metrics | {"mismatch/logprob_abs_mean": mismatch}))
    rows.append(("rl", 3, {"mismatch/both/logprob_abs_mean": 1e-4, "mismatch/neither/logprob_abs_mean": 1e-3}))
    files = draw_curves(write(tmp_path / "metrics.jsonl", rows), tmp_path / "curves", "a run")
    names = ["curves.png", "reward.png", "accuracy.png", "length.png", "mismatch.png"]
    assert [file.name for file in files] == names
    assert all(file.read_bytes().startswith(PNG) for file in files)


def test_only_charts_with_data_are_drawn(tmp_path: Path):
    path = write(tmp_path / "metrics.jsonl", [("evaluation", 0, {"accuracy/mean": 0.4})])
    assert [file.name for file in draw_curves(path, tmp_path)] == ["curves.png", "accuracy.png"]


def test_a_run_without_curves_draws_nothing(tmp_path: Path):
    path = write(tmp_path / "metrics.jsonl", [("sft", 1, {"sft/loss": 1.0})])
    assert draw_curves(path, tmp_path / "curves") == []
    assert not (tmp_path / "curves").exists()
