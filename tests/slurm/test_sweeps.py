"""A sweep as jobs: submitted with one command, compared by a job after them, gone on with where one failed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_jobs import check, launch

from moerl.launch.sweeps.manifest import read_manifest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]
SWEPT = (
    "recipe=tiny",
    "rl.steps=2",
    "sft.steps=1",
    "evaluation.every=0",
    "seed=1,2,3",
    "keep_routing.mode=off,rollout",
)


def sweep(slurm: Cluster, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`moerl launch slurm -m`."""
    return launch(slurm, folder, "-m", "--max-requeues", "0", *arguments, place=f"sweep.dir={folder}")


def report_job(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"^report: job (\d+),", done.stdout, re.MULTILINE)
    assert match, done.stdout
    return match[1]


def states(folder: Path) -> list[str]:
    return [run.state for run in read_manifest(folder).runs]


def test_two_modes_by_three_seeds_are_jobs_a_failing_one_is_named_and_mended_alone(
    slurm: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    planted = folder / "001_seed-1_mode-rollout" / "checkpoints"
    planted.parent.mkdir(parents=True)
    planted.write_text("in the way of checkpoints")
    shown = sweep(slurm, folder, *SWEPT, "--dry-run")
    assert shown.stdout.count("#SBATCH --job-name=") == 6, shown.stderr
    assert slurm.call("squeue", "--noheader") == ""
    report = report_job(sweep(slurm, folder, *SWEPT, "sweep.jobs=2"))
    check(folder / "report.sbatch")
    waiting = [job.split() for job in slurm.call("squeue", "--noheader", "--format=%i %R").splitlines()]
    assert sum("Dependency" in reason for _, *reason in map(tuple, waiting) for reason in reason) >= 3

    again = sweep(slurm, folder)
    assert "waits or runs" in again.stdout
    slurm.call("scancel", report_job(again))
    ended = slurm.wait_for(report, "FAILED", seconds=900)
    told = (folder / f"report-{report}.log").read_text()
    assert ended["ExitCode"] == "1:0", told
    assert states(folder) == ["finished", "failed", *["finished"] * 4], told
    assert "1 of 6 runs" in told

    planted.unlink()
    mended = sweep(slurm, folder, *SWEPT)
    assert mended.stdout.count("was finished before") == 5
    report = report_job(mended)
    slurm.wait_for(report, "COMPLETED", seconds=600)
    assert states(folder) == ["finished"] * 6
    numbers = json.loads((folder / "report.json").read_text())
    assert [each["values"]["keep_routing.mode"] for each in numbers["settings"]] == ["off", "rollout"]
    assert [each["finals"]["reward/mean"]["runs"] for each in numbers["settings"]] == [3, 3]


def test_what_no_job_can_be_made_of_is_refused_before_one_is_submitted(slurm: Cluster, tmp_path: Path) -> None:
    for arguments, part in (
        (("recipe=tiny", "seed=1"), "nothing is swept"),
        (("recipe=tiny", "optimizer.lr=1e-4,-1"), "in the run with optimizer.lr=-1; no run was started"),
        (("recipe=tiny", "seed=1,2", "--name", "a"), "--name: jobs of a sweep are named as its runs"),
        (("recipe=tiny", "seed=1,2", "launch.on=ray", "--nodes", "0"), "a number is too small"),
    ):
        done = sweep(slurm, tmp_path / "sweep", *arguments)
        assert done.returncode == 2, done.stdout
        assert part in done.stderr
    assert slurm.call("squeue", "--noheader") == ""
