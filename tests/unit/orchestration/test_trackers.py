"""Runs whose trackers fail, and runs that get another tracker when they go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_sinks import make_sink, told
from waiting import is_alive

from moerl.diagnostics.summary import RunSummary
from moerl.errors import ConfigError
from moerl.orchestration.reporting import Reporter
from moerl.orchestration.trackers import without_secrets

SUMMARY = RunSummary("tiny", 1, 3, 0, 1.0, 1, 0)


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("failure", ["2:raise", "2:die"])
def test_a_tracker_that_fails_is_said_once_and_at_the_end_and_the_run_goes_on(
    failure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, sound = make_sink(tmp_path / "broken", failure), make_sink(tmp_path / "sound")
    with Reporter(tmp_path, "a run", trackers=[broken, sound]) as reporter:
        for step in (1, 2, 3):
            reporter.log("rl", step, {"reward/mean": 0.1})
            reporter.sync()
        reporter.finish(SUMMARY)
    lines = capsys.readouterr().out.splitlines()
    [warning] = [line for line in lines if "WARNING: wandb failed after step 2 of rl: " in line]
    assert "metrics.jsonl has all" in warning
    assert warning.replace("WARNING", "note") in lines[-1]
    assert steps(tmp_path) == [1, 2, 3]
    assert [row["rl/step"] for row in told(tmp_path / "sound")] == [1, 2, 3]
    assert told(tmp_path / "sound", "finished") == [0]
    assert not is_alive(broken.pid)
    assert not is_alive(sound.pid)


def test_a_tracker_that_cannot_be_started_ends_the_run_and_leaves_no_process(tmp_path: Path) -> None:
    sound, broken = make_sink(tmp_path / "sound"), make_sink(tmp_path / "broken", "open")
    with pytest.raises(ConfigError) as caught, Reporter(tmp_path, "a run", trackers=[sound, broken]):
        pass
    assert "metrics.sinks: wandb cannot be started; seen: RuntimeError: no such project" in str(caught.value)
    assert str(broken.log) in str(caught.value)
    assert not is_alive(sound.pid)
    assert not is_alive(broken.pid)


def test_a_run_that_ends_by_an_error_is_a_failed_one_in_its_trackers(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Reporter(tmp_path, "a run", trackers=[make_sink(tmp_path / "one")]):
        raise RuntimeError
    assert told(tmp_path / "one", "finished") == [1]


def test_whoever_interrupts_a_run_does_not_wait_for_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moerl.orchestration.trackers._HURRIED_SECONDS", 0.2)
    sink = make_sink(tmp_path / "one", "1:hang")

    def run() -> None:
        with Reporter(tmp_path, "a run", trackers=[sink]) as reporter:
            reporter.log("rl", 1, {"reward/mean": 0.1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not is_alive(sink.pid)


def test_a_tracker_that_a_run_gets_when_it_goes_on_is_told_the_rows_so_far(tmp_path: Path) -> None:
    with Reporter(tmp_path, "a run", trackers=[make_sink(tmp_path / "old")]) as reporter:
        for step in (1, 2, 3):
            reporter.log("rl", step, {"reward/mean": step / 10})
    sinks = [make_sink(tmp_path / "old"), make_sink(tmp_path / "new")]
    with Reporter(tmp_path, "a run", trackers=sinks) as reporter:
        reporter.rewind("rl", 2, evaluated=True)
        reporter.log("rl", 3, {"reward/mean": 0.3})
    assert [row["rl/step"] for row in told(tmp_path / "new")] == [1, 2, 3]
    assert [row["rl/step"] for row in told(tmp_path / "old")] == [1, 2, 3, 2, 3]
    assert "rl/resumed" in told(tmp_path / "old")[3]


def test_a_run_without_tensorboard_writes_no_events(tmp_path: Path) -> None:
    with Reporter(tmp_path, "a run", tensorboard=False) as reporter:
        reporter.log("rl", 1, {"reward/mean": 0.1})
    assert not (tmp_path / "tensorboard").exists()


def test_trackers_get_no_values_of_keys_that_are_called_like_a_secret() -> None:
    config = {"a": {"api_key": "x", "hf_token": "y", "admin_key": None}, "max_new_tokens": 16, "password": "z"}
    assert without_secrets(config) == {
        "a": {"api_key": "(left out)", "hf_token": "(left out)", "admin_key": None},
        "max_new_tokens": 16,
        "password": "(left out)",
    }
