"""Attempts of a job: another one is worthwhile or not, by the checkpoints that its run wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from disks import full_disk

from moerl.launch.slurm.attempts import ATTEMPTS_FILE, Job, begin, end, last_attempt, main


def job(run_dir: Path, *, job_id: str = "7", max_requeues: int = 1) -> Job:
    return Job(run_dir, job_id, max_requeues)


def write_checkpoint(run_dir: Path, name: str) -> None:
    (run_dir / "checkpoints" / name).mkdir(parents=True)


def call(run_dir: Path, event: str, *arguments: str, job_id: str = "7") -> int:
    return main([event, str(run_dir), "--max-requeues", "1", *arguments], {"SLURM_JOB_ID": job_id})


def test_attempts_are_numbered_over_all_jobs_of_a_run_and_each_has_a_log(tmp_path: Path) -> None:
    assert begin(job(tmp_path), restarts=0).name == "attempt-001.log"
    write_checkpoint(tmp_path, "1-rl-000001")
    assert begin(job(tmp_path), restarts=1).name == "attempt-002.log"
    assert begin(job(tmp_path, job_id="8"), restarts=0).name == "attempt-003.log"
    rows = [json.loads(line) for line in (tmp_path / "slurm" / ATTEMPTS_FILE).read_text().splitlines()]
    assert [(row["job"], row["restarts"], row["checkpoint"]) for row in rows] == [
        ("7", 0, ""),
        ("7", 1, "1-rl-000001"),
        ("8", 0, "1-rl-000001"),
    ]


def test_a_line_that_a_full_disk_broke_off_is_no_attempt_and_stops_no_later_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [call(tmp_path, "begin"), call(tmp_path, "end", "--status", "75")] == [0, 75]
    file = tmp_path / "slurm" / ATTEMPTS_FILE
    whole = file.read_text()
    with full_disk(len(whole) + 40):
        assert call(tmp_path, "begin") == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: cannot write {file}; seen: File too large")
    assert len(file.read_bytes()) == len(whole) + 40
    assert last_attempt(tmp_path) == json.loads(whole.splitlines()[-1])
    assert [call(tmp_path, "begin"), call(tmp_path, "end", "--status", "0")] == [0, 0]
    assert file.read_text().startswith(whole)
    assert [json.loads(line)["attempt"] for line in file.read_text().splitlines()] == [1, 1, 2, 2]


@pytest.mark.parametrize(("status", "code"), [(0, 0), (75, 75), (1, 75), (137, 75), (138, 75), (2, 2), (130, 130)])
def test_what_may_go_better_is_requeued_and_the_rest_is_not(tmp_path: Path, status: int, code: int) -> None:
    begin(job(tmp_path), restarts=0)
    assert end(job(tmp_path), status) == code


def test_a_job_that_writes_no_new_checkpoint_fails_after_its_requeues_and_says_where_to_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [call(tmp_path, "begin"), call(tmp_path, "end", "--status", "1")] == [0, 75]
    assert [call(tmp_path, "begin"), call(tmp_path, "end", "--status", "1")] == [0, 1]
    told = capsys.readouterr().err
    assert "attempt 1 ended with status 1, newest checkpoint none: requeue" in told
    assert "error: job 7 makes no progress and is not requeued; seen: 2 attempts in a row" in told
    assert f"read {tmp_path}/slurm/attempt-002.log" in told


def test_a_new_checkpoint_gives_a_job_all_its_requeues_again(tmp_path: Path) -> None:
    for step in range(1, 6):
        assert call(tmp_path, "begin") == 0
        write_checkpoint(tmp_path, f"1-rl-{step:06d}")
        assert call(tmp_path, "end", "--status", "1") == 75
    assert [call(tmp_path, "begin"), call(tmp_path, "end", "--status", "1")] == [0, 75]
    assert [call(tmp_path, "begin"), call(tmp_path, "end", "--status", "1")] == [0, 1]


def test_attempts_on_lost_nodes_count_although_they_never_came_to_their_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [call(tmp_path, "begin"), call(tmp_path, "begin"), call(tmp_path, "begin")] == [0, 0, 1]
    assert "makes no progress" in capsys.readouterr().err


def test_a_new_job_at_the_same_run_has_all_its_requeues(tmp_path: Path) -> None:
    assert [call(tmp_path, "begin"), call(tmp_path, "begin"), call(tmp_path, "begin")] == [0, 0, 1]
    assert call(tmp_path, "begin", job_id="8") == 0
    assert call(tmp_path, "end", "--status", "75", job_id="8") == 75


def test_a_finished_run_is_never_requeued_however_often_it_failed_before(tmp_path: Path) -> None:
    assert [call(tmp_path, "begin"), call(tmp_path, "begin"), call(tmp_path, "end", "--status", "0")] == [0, 0, 0]


def test_a_damaged_file_of_attempts_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(job(tmp_path), restarts=0)
    (tmp_path / "slurm" / ATTEMPTS_FILE).write_text("{}\n")
    assert call(tmp_path, "begin") == 1
    assert "cannot be read" in capsys.readouterr().err
