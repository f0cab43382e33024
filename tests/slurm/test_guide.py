"""The ten steps of docs/clusters.md, each line run as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_jobs import ROOT, Submitted

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


def blocks() -> list[str]:
    """The code of the steps, in order."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    steps = text.partition("## From sbatch to report")[2].partition("\n## ")[0]
    return [
        re.sub(r"^ {3}", "", block, flags=re.MULTILINE).strip() for block in re.findall(r"```\n(.*?)```", steps, re.S)
    ]


def test_the_ten_steps_lead_from_a_submission_to_a_report(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in (("moerl", '-m moerl "$@"'), ("python", '"$@"')):
        (programs / name).write_text(f"#!/bin/bash\nexec {sys.executable} {line}\n")
        (programs / name).chmod(0o755)
    environment = {**slurm.environment, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def shell(line: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    site, dry_run, submit, report, stop, attempts = blocks()
    shell(site)
    assert "heaviest rank" in shell(dry_run)
    job = Submitted(slurm, shell(submit).split()[1].rstrip(","), tmp_path / "runs" / "job")
    report_job = shell(report).split()[-1]
    assert job.job_id in shell("squeue --me")
    job.wait_for_step(1)
    # Before the run is done, which it soon is.
    shell(stop)
    assert "state " in shell("moerl status runs/job")
    job.wait_for_end(1)
    assert '"code": 75' in shell(attempts)
    job.wait_for("COMPLETED")
    slurm.wait_for(report_job, "COMPLETED")
    assert (tmp_path / "runs" / "job" / "report.html").stat().st_size > 10_000
