"""Submission of scripts to SLURM, and questions to its queue. Torch-free; a login node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from moerl.contract.files import atomic_file, writing
from moerl.errors import ConfigError, MoerlError
from moerl.launch.slurm.attempts import FOLDER
from moerl.launch.slurm.script import JobSettings
from moerl.processes.host import run_command
from moerl.reading import read_json

COMMAND_SECONDS = 120.0
JOB_FILE = "job.json"
"""File in a run's folder `slurm`: the id of its latest job."""


def queued_jobs() -> set[str]:
    """Returns the ids of this user's jobs that wait or run.

    Raises:
        ConfigError: SLURM is not on this machine, or refuses to answer. MoerlError: it did not answer.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "launch slurm: SLURM is not on this machine",
            seen="no sbatch",
            expected="a login node of the cluster",
            remedy="run it there; --dry-run shows the script anywhere",
        )
    return set(_ask("squeue", "--me", "--noheader", "--format=%A").split())


def latest_job(run_dir: Path) -> str | None:
    """Returns the id of the job that was submitted last for a run; None if there is none."""
    file = run_dir / FOLDER / JOB_FILE
    return str(read_json(file)["job"]) if file.exists() else None


def refuse_queued(run_dir: Path, queued: set[str]) -> None:
    """Raises `ConfigError` if the run has a job that waits or runs."""
    job = latest_job(run_dir)
    if job in queued:
        raise ConfigError(
            "run_dir: a job that waits or runs works on this run",
            seen=f"job {job} for {run_dir}",
            expected="a run without one",
            remedy=f"wait for it, or end it with `scancel {job}`",
        )


def submit(job: JobSettings, script: str, *, after: Sequence[str] = ()) -> str:
    """Writes a job's script into its run directory and submits it; returns its id.

    Args:
        after: ids of jobs that have to end first, however they do.

    Raises:
        ConfigError: SLURM is not here, or refuses the job. MoerlError: it did not answer.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with writing(job.script):
        job.script.write_text(script, encoding="utf-8")
    number = submit_file(job.script, after=after)
    file = job.folder / JOB_FILE
    with writing(file), atomic_file(file) as temporary:
        temporary.write_text(json.dumps({"job": number}) + "\n", encoding="utf-8")
    return number


def submit_file(script: Path, *, after: Sequence[str] = ()) -> str:
    """Submits a script that is written already; returns the job's id. Arguments and errors are those of `submit`."""
    dependency = [f"--dependency=afterany:{':'.join(after)}"] if after else []
    return _ask("sbatch", "--parsable", *dependency, str(script)).strip().partition(";")[0]


def _ask(*command: str) -> str:
    try:
        done = run_command(command, COMMAND_SECONDS)
    except TimeoutError as error:
        raise MoerlError(
            f"{command[0]} did not answer",
            seen=f"nothing within {COMMAND_SECONDS:g} s",
            expected="an answer of SLURM",
            remedy="look with `squeue --me` whether something was submitted, before you try again",
        ) from error
    if done.returncode != 0:
        raise ConfigError(
            "SLURM refused the job" if command[0] == "sbatch" else f"{command[0]} failed",
            seen=done.stderr.strip() or f"{command[0]} ended with status {done.returncode}",
            expected="a job that this site takes",
            remedy=f"correct --site, --time or --nodes; the script is {command[-1]}"
            if command[0] == "sbatch"
            else "ask whoever runs this cluster",
        )
    return done.stdout
