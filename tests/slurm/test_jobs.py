"""Runs as jobs of a real SLURM: submitted, stopped, requeued, and gone on with."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from moerl_runs import DoneRun, rows
from run_checks import assert_the_same, processes_of
from slurm_cluster import Cluster
from slurm_jobs import ROOT, TRAIN, children, controller, submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


def test_a_run_that_is_submitted_is_completed_with_what_it_leaves_behind(
    slurm: Cluster, undisturbed: DoneRun, tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path / "run", *TRAIN)
    ended = job.wait_for("COMPLETED")
    assert ended["ExitCode"] == "0:0"
    assert ended["Restarts"] == "0"
    assert job.ends() == [(0, 0)]
    assert_the_same(job.run_dir, undisturbed.folder)


def test_a_run_told_to_stop_commits_is_requeued_and_ends_as_if_undisturbed(
    slurm: Cluster, undisturbed: DoneRun, tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path / "run", *TRAIN)
    job.wait_for_step(1)
    slurm.call("scancel", "--batch", "--signal=USR1", job.job_id)  # as SLURM does before the time limit
    ended = job.wait_for("COMPLETED")
    assert ended["Restarts"] == "1", job.told()
    assert job.ends() == [(75, 75), (0, 0)]
    begins = [row for row in job.attempts() if row["event"] == "begin"]
    assert [row["attempt"] for row in begins] == [1, 2]
    assert begins[1]["checkpoint"] > begins[0]["checkpoint"]
    assert "SIGUSR1: stopping at the next safe point" in (job.run_dir / "slurm/attempt-001.log").read_text()
    assert "going on from step" in (job.run_dir / "slurm/attempt-002.log").read_text()
    assert_the_same(job.run_dir, undisturbed.folder)


def test_a_job_that_is_preempted_commits_makes_room_and_ends_as_if_undisturbed(
    slurm: Cluster, undisturbed: DoneRun, tmp_path: Path
) -> None:
    """SLURM tells steps alone: a script that waits for a signal to its shell is killed when the grace time is over."""
    job = submit(slurm, tmp_path / "run", *TRAIN)
    job.wait_for_step(1)
    urgent = slurm.sbatch("--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true")
    slurm.wait_for(urgent, "COMPLETED")
    assert job.ends() == [(75, 75)]
    assert job.job()["JobState"] in ("PENDING", "RUNNING"), "preempted, and not ended"
    assert job.wait_for("COMPLETED")["Restarts"] == "1"
    assert job.ends() == [(75, 75), (0, 0)]
    assert_the_same(job.run_dir, undisturbed.folder)


def test_a_killed_rank_and_a_killed_controller_are_gone_on_from(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "run", *TRAIN, "parallel.expert=2")
    job.wait_for_step(1)
    os.kill(children(controller(job.run_dir), "moerl.ranks")[0], signal.SIGKILL)
    job.wait_for_end(1)
    job.wait_for_step(3)
    os.kill(controller(job.run_dir), signal.SIGKILL)
    assert job.wait_for("COMPLETED")["Restarts"] == "2"
    assert job.ends() == [(1, 75), (137, 75), (0, 0)]
    assert "killed by SIGKILL" in (job.run_dir / "slurm/attempt-001.log").read_text()
    assert [row["step"] for row in rows(job.run_dir) if row["stage"] == "rl"] == [1, 2, 3, 4]
    assert (job.run_dir / "summary.json").exists()


def test_a_run_that_hangs_is_killed_before_the_time_limit_and_requeued(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "run", *TRAIN)
    job.wait_for_step(1)
    os.kill(controller(job.run_dir), signal.SIGSTOP)
    slurm.call("scancel", "--batch", "--signal=USR1", job.job_id)
    job.wait_for_end(1)
    slurm.call("scancel", job.job_id)
    assert job.ends()[0] == (137, 75)


def test_a_job_that_is_cancelled_stays_so_and_leaves_no_process(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "run", *TRAIN)
    job.wait_for_step(1)
    slurm.call("scancel", job.job_id)
    slurm.wait_until(lambda: slurm.call("squeue", "--noheader") == "", job.job_id)
    assert job.job()["JobState"] == "CANCELLED", job.told()
    assert processes_of(job.run_dir) == []
    assert (job.run_dir / "checkpoints").is_dir()


def test_a_job_that_crashes_again_and_again_fails_and_says_where_to_look(slurm: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way of checkpoints\n")
    job = submit(slurm, run, *TRAIN, "sft.steps=1", "--max-requeues", "1")
    ended = job.wait_for("FAILED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("1", "1:0"), job.told()
    assert job.ends() == [(1, 75), (1, 75)]
    log = (run / "slurm" / f"job-{job.job_id}.log").read_text()
    assert "makes no progress and is not requeued; seen: 2 attempts in a row" in log
    assert f"read {run}/slurm/attempt-002.log" in log


def test_an_array_over_seeds_is_compared_by_a_job_that_waits_for_it(slurm: Cluster, tmp_path: Path) -> None:
    scripts = ROOT / "scripts" / "slurm"
    runs = [tmp_path / "sweep" / f"seed-{seed}" for seed in (0, 1)]
    output = f"--output={tmp_path}/%x-%A-%a.log"
    slurm.environment["PYTHON"] = sys.executable
    place = (f"--chdir={ROOT}", output, "--time=60")
    keys = ("recipe=tiny", "rl.steps=1", "sft.steps=1")
    array = slurm.sbatch("--array=0-1", *place, str(scripts / "sweep.sbatch"), str(tmp_path / "sweep"), *keys, cwd=ROOT)
    report = slurm.sbatch(f"--dependency=afterok:{array}", *place, str(scripts / "report.sbatch"), *map(str, runs))
    assert slurm.job(report)["Reason"] == "Dependency"
    ended = slurm.wait_for(report, "COMPLETED")
    assert ended["JobName"] == "moerl-report"
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs] == [0, 1]
    assert (tmp_path / "sweep" / "comparison.html").stat().st_size > 10_000
