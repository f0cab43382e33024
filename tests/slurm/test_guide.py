"""The ten steps of docs/clusters.md and the example for one node, each line run as it is written."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from example_commands import EXAMPLES, command_of
from slurm_cluster import Cluster
from slurm_jobs import ROOT, Submitted
from waiting import run_within

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


def blocks() -> list[str]:
    """The code of the steps, in order."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    steps = text.partition("## From sbatch to report")[2].partition("\n## ")[0]
    return [
        re.sub(r"^ {3}", "", block, flags=re.MULTILINE).strip() for block in re.findall(r"```\n(.*?)```", steps, re.S)
    ]


def shell_in(folder: Path, slurm: Cluster) -> Callable[[str], str]:
    """Returns a function that runs a line of bash there, with `moerl` and the cluster, and returns what it printed."""
    programs = folder / "bin"
    programs.mkdir()
    for name, line in (("moerl", '-m moerl "$@"'), ("python", '"$@"')):
        (programs / name).write_text(f"#!/bin/bash\nexec {sys.executable} {line}\n")
        (programs / name).chmod(0o755)
    environment = {**slurm.environment, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def shell(line: str) -> str:
        done = run_within(["bash", "-euo", "pipefail", "-c", line], 300, cwd=folder, env=environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    return shell


def test_the_ten_steps_lead_from_a_submission_to_a_report(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    shell = shell_in(tmp_path, slurm)
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


def test_the_example_for_one_node_becomes_a_run_that_is_finished(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "slurm_one_node"
    shutil.copytree(EXAMPLES / "slurm_one_node", folder)
    said = shell_in(folder, slurm)(command_of("slurm_one_node").removesuffix(" --dry-run"))
    job = Submitted(slurm, said.split()[1].rstrip(","), folder / "runs" / "one_node")
    job.wait_for("COMPLETED")
    assert (job.run_dir / "final_model" / "config.json").is_file()
