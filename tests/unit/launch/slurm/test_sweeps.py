"""The state of each run of a sweep, as its directory and the queue tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.errors import ConfigError
from moerl.launch.slurm import sweeps
from moerl.launch.slurm.attempts import ATTEMPTS_FILE, FOLDER
from moerl.launch.slurm.submit import JOB_FILE, refuse_queued
from moerl.launch.sweeps.manifest import Manifest, SweepRun, read_manifest, write_manifest


def run_directory(
    folder: Path, *, job: str | None = None, attempts: tuple[int | None, ...] = (), attempts_of: str | None = None
) -> Path:
    """A run with the id of its latest job, and attempts that ended with these statuses; None: one that did not.
    attempts_of: the job of the attempts, the latest if not said."""
    (folder / FOLDER).mkdir(parents=True)
    if job is not None:
        (folder / FOLDER / JOB_FILE).write_text(json.dumps({"job": job}))
    rows: list[dict[str, object]] = []
    for number, status in enumerate(attempts, 1):
        row = {"attempt": number, "job": attempts_of or job or "0"}
        rows.append({"event": "begin", **row})
        if status is not None:
            rows.append({"event": "end", **row, "status": status})
    (folder / FOLDER / ATTEMPTS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_directories_and_the_queue_tell_the_state_of_each_run(tmp_path: Path) -> None:
    finished = run_directory(tmp_path / "finished", job="1", attempts=(75, 0))
    (finished / "summary.json").write_text("{}")
    run_directory(tmp_path / "queued", job="2")
    run_directory(tmp_path / "again", job="8", attempts=(1,), attempts_of="7")
    run_directory(tmp_path / "running", job="3", attempts=(75, None))
    run_directory(tmp_path / "stopped", job="4", attempts=(75,))
    run_directory(tmp_path / "cancelled", job="5", attempts=(None,))
    run_directory(tmp_path / "failed", job="6", attempts=(1,))
    run_directory(tmp_path / "killed", job="7", attempts=(75, 137))
    names = ["finished", "queued", "again", "running", "stopped", "cancelled", "failed", "killed", "never"]
    manifest = Manifest([], None, ["seed"], [SweepRun(name, {"seed": "1"}) for name in names])
    sweeps.note_states(manifest, tmp_path, queued={"2", "3", "8"})
    assert {run.name: (run.state, run.status) for run in manifest.runs} == {
        "finished": ("finished", 0),
        "queued": ("waiting", None),
        "again": ("waiting", None),
        "running": ("running", None),
        "stopped": ("stopped", 75),
        "cancelled": ("stopped", None),
        "failed": ("failed", 1),
        "killed": ("failed", 137),
        "never": ("waiting", None),
    }


def test_a_run_whose_job_is_in_the_queue_is_not_submitted_again(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", job="12")
    refuse_queued(run, {"13"})
    refuse_queued(tmp_path / "other", {"12"})
    with pytest.raises(ConfigError, match="scancel 12"):
        refuse_queued(run, {"12", "13"})


def test_the_last_job_ends_with_1_where_a_run_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_directory(tmp_path / "a", attempts=(1,))
    write_manifest(Manifest([], None, ["seed"], [SweepRun("a", {"seed": "1"}), SweepRun("b", {"seed": "2"})]), tmp_path)
    assert sweeps.main([str(tmp_path)]) == 1
    assert [run.state for run in read_manifest(tmp_path).runs] == ["failed", "waiting"]
    assert "failed (1)" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()
    assert sweeps.main([str(tmp_path / "nowhere")]) == 1
    assert "holds no sweep" in capsys.readouterr().err
