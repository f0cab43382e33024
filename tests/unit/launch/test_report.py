"""`moerl report`: which files it reads and writes, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from moerl import cli
from moerl.diagnostics.report.data import read_report
from moerl.launch.report import report_parser, run_report

ROW = {"stage": "rl", "step": 1, "mismatch/logprob_abs_mean": 0.001, "replay/rows_verified": 8.0}


def make_run(run_dir: Path, *rows: Mapping[str, object]) -> Path:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(
        "recipe: mine\nkeep_routing: {mode: off}\nkeep_sampling_mask: {enabled: true}\n"
    )
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_a_run_directory_gets_a_page_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "wide", ROW)
    assert report(run_dir) == 0
    out = capsys.readouterr().out
    assert str(run_dir / "report.html") in out
    stored = read_report(run_dir / "report.json")
    assert stored.verdict.text in out
    assert ("Recipe", "mine") in stored.facts
    assert ("Routing kept", "no") in stored.facts
    assert "<h1>Run wide</h1>" in (run_dir / "report.html").read_text()


def test_the_page_goes_where_it_is_told(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "wide", ROW)
    assert report(run_dir, "--output", tmp_path / "mine.html") == 0
    assert (tmp_path / "mine.json").exists()
    assert not (run_dir / "report.html").exists()


def test_a_stored_report_is_drawn_again(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "wide", ROW)
    report(run_dir)
    (run_dir / "report.html").unlink()
    assert report(run_dir / "report.json") == 0
    assert (run_dir / "report.html").exists()


def test_runs_are_compared_under_names_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = make_run(tmp_path / "a/run", ROW)
    other = make_run(tmp_path / "b/run", ROW | {"mismatch/logprob_abs_mean": 0.01})
    report(other)
    assert report("--compare", one, other / "report.json") == 0
    assert "The gap of b/run is 10.0 times that of a/run" in capsys.readouterr().out
    assert "b/run" in (tmp_path / "comparison.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which run?"),
        (["RUN", "RUN"], "which run?"),
        (["--compare", "RUN"], "nothing to compare with"),
        (["missing"], "is not there"),
        (["EMPTY"], "no step of reinforcement learning is done"),
        (["RUN", "--output", "page.txt"], "ends in .html"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    places = {"RUN": make_run(tmp_path / "run", ROW), "EMPTY": make_run(tmp_path / "empty")}
    assert report(*(places.get(each, each) for each in arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err


def test_damaged_metrics_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "wide", ROW)
    (run_dir / "metrics.jsonl").write_text("not json\n")
    assert report(run_dir) == 1
    assert "line 1: not JSON" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "wide", ROW)
    (tmp_path / "file").write_text("")
    assert report(run_dir, "--output", tmp_path / "file/page.html") == 1
    assert "cannot write" in capsys.readouterr().err


def test_help_shows_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--help") == 0
    out = capsys.readouterr().out
    assert "moerl report RUN_DIR" in out
    assert "--compare" in out


def test_the_parser_takes_sources_before_and_after_options(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "wide", ROW)
    options = report_parser().parse_intermixed_args([str(run_dir), "--output", str(tmp_path / "x.html")])
    assert run_report(options) == 0
