"""summary.json and the closing lines, worded as what a run showed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.diagnostics.summary import RunSummary, closing_lines, write_summary

FIGURES = {"neither": 4.5e-3, "kept_sets": 2e-3, "experts": 4e-3, "both": 7e-4}
SUMMARY = RunSummary(
    recipe="laptop",
    seed=1,
    steps=50,
    tokens_trained=1_234_567,
    wall_seconds=186.0,
    peak_rss_bytes=2 * 2**30,
    heldout_problems=1000,
    heldout_accuracy_cold_start=0.44,
    heldout_accuracy_cold_start_worked=0.85,
    heldout_accuracy_final=0.86,
    response_length_cold_start=20.1,
    response_length_final=33.4,
    mismatch_first={scorer: {"mismatch/logprob_abs_mean": value} for scorer, value in FIGURES.items()},
    mismatch={scorer: {"mismatch/logprob_abs_mean": value / 2} for scorer, value in FIGURES.items()},
)


def closing(summary: RunSummary) -> str:
    return "\n".join(closing_lines(summary, Path("runs/x")))


def test_the_summary_holds_what_a_reader_looks_for(tmp_path: Path):
    path = write_summary(SUMMARY, tmp_path)
    values = json.loads(path.read_text())
    for name in (
        "heldout_accuracy_cold_start",
        "heldout_accuracy_cold_start_worked",
        "heldout_accuracy_final",
        "wall_seconds",
        "peak_rss_bytes",
        "steps",
        "tokens_trained",
        "mismatch",
    ):
        assert values[name] == getattr(SUMMARY, name)
    assert values["shows_skill"] is False
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path):
    write_summary(SUMMARY, tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        write_summary(replace(SUMMARY, wall_seconds=float("nan")), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["wall_seconds"] == 186.0


def test_a_gain_no_better_than_the_worked_cold_start_is_called_behaviour():
    text = closing(SUMMARY)
    assert "accuracy 0.440 -> 0.860 (greedy, 1000 held-out problems)" in text
    assert "response length 20.1 -> 33.4 tokens" in text
    assert "made to show its work: 0.850" in text
    assert "it learned to show its work, not to calculate better" in text


def test_skill_is_claimed_only_beyond_chance():
    assert not replace(SUMMARY, heldout_accuracy_final=0.87).shows_skill
    better = replace(SUMMARY, heldout_accuracy_final=0.90)
    assert better.shows_skill
    assert "works better" in closing(better)


def test_a_run_that_gained_nothing_says_so():
    assert "nothing was gained" in closing(replace(SUMMARY, heldout_accuracy_final=0.40))


def test_a_task_without_worked_answers_gets_no_verdict():
    text = closing(replace(SUMMARY, heldout_accuracy_cold_start_worked=None))
    assert "accuracy 0.440 -> 0.860" in text
    assert "work" not in text


def test_a_cold_start_alone_reports_its_accuracy():
    text = closing(replace(SUMMARY, heldout_accuracy_final=None))
    assert "accuracy 0.440 (greedy" in text
    assert "accuracy" not in closing(replace(SUMMARY, heldout_accuracy_final=None, heldout_accuracy_cold_start=None))


def test_the_closing_lines_say_what_it_took_and_where_it_is():
    text = closing(SUMMARY)
    cost = "50 steps, 1,234,567 tokens trained in 3.1 minutes (6,637 tokens/s, start and evaluations included)"
    assert f"{cost}, peak memory 2.0 GiB" in text
    assert text.endswith("run directory: runs/x")
    assert "quarantine" not in text
    assert "3 trajectories broke the data contract" in closing(replace(SUMMARY, num_quarantined=3))


def test_the_mismatch_of_the_first_and_the_last_step_is_a_table():
    lines = closing(SUMMARY).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("sampler, trainer: mean |log-prob difference|"))
    assert [line.split()[-2:] for line in lines[start + 1 : start + 5]] == [
        ["4.5e-03", "2.2e-03"],
        ["2.0e-03", "1.0e-03"],
        ["4.0e-03", "2.0e-03"],
        ["7.0e-04", "3.5e-04"],
    ]
    assert lines[start + 1].startswith("  own routing, full vocabulary")
    assert lines[start + 4].startswith("  recorded routing, inside the kept sets")
    assert len({len(line) for line in lines[start : start + 5]}) == 1


def test_a_run_without_a_mismatch_table_reports_none():
    assert "log-prob difference" not in closing(replace(SUMMARY, mismatch={}))
