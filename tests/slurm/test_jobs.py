"""Runs as jobs of a real SLURM: submitted, stopped, requeued, and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster
from jobs import TRAIN, submit
from moerl_runs import DoneRun
from run_checks import assert_the_same

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


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
