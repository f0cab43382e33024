"""Jobs that tests submit: `moerl launch slurm`, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_cluster import Cluster
from waiting import run_within

ROOT = Path(__file__).parents[1]
TRAIN = ["recipe=tiny", "rl.steps=4"]
SITE = "cpus_per_node: 1\n"


@dataclass(frozen=True)
class Submitted:
    """A job and the run that it works on."""

    slurm: Cluster
    job_id: str
    run_dir: Path

    def attempts(self) -> list[dict[str, Any]]:
        file = self.run_dir / "slurm" / "attempts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def ends(self) -> list[tuple[int, int]]:
        """Status of each attempt that came to its end, and what was made of it."""
        return [(row["status"], row["code"]) for row in self.attempts() if row["event"] == "end"]

    def job(self) -> dict[str, str]:
        return self.slurm.job(self.job_id)

    def told(self) -> str:
        """Returns what the batch shell printed, and the logs of all attempts."""
        files = sorted((self.run_dir / "slurm").glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)

    def wait_for(self, *states: str) -> dict[str, str]:
        try:
            return self.slurm.wait_for(self.job_id, *states)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from error

    def wait_for_end(self, number: int) -> None:
        """Until so many attempts have come to their end."""
        self.slurm.wait_until(lambda: len(self.ends()) >= number, self.job_id)

    def wait_for_step(self, step: int) -> None:
        """Until the metrics of a step of reinforcement learning are there."""
        metrics = self.run_dir / "metrics.jsonl"
        self.slurm.wait_until(lambda: metrics.exists() and f'"rl", "step": {step}' in metrics.read_text(), self.job_id)


def launch(
    slurm: Cluster, run_dir: Path, *arguments: str, site: str = SITE, place: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`moerl launch slurm` with an hour of time, on one node unless `arguments` say more.

    place: the word that names the directory; `run_dir=` if not said.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    site_file = run_dir.parent / "site.yaml"
    site_file.write_text(site)
    limits = ("--time", "60", "--signal-seconds", "60", "--site", str(site_file))
    command = [sys.executable, "-m", "moerl", "launch", "slurm", place or f"run_dir='{run_dir}'", *limits, *arguments]
    return run_within(command, 300, env=slurm.environment, cwd=run_dir.parent)


def submit(slurm: Cluster, run_dir: Path, *arguments: str, site: str = SITE) -> Submitted:
    done = launch(slurm, run_dir, *arguments, site=site)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("job ")]
    return Submitted(slurm, line.split()[1].rstrip(","), run_dir)


def children(pid: int, word: str) -> list[int]:
    """Children of a process with this on their command line."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(each) for task in tasks for each in task.read_text().split()]
    return [each for each in pids if word in Path(f"/proc/{each}/cmdline").read_bytes().decode()]


def controller(run_dir: Path) -> int:
    """The process that holds the run directory."""
    return int(json.loads((run_dir / "run.lock").read_text())["pid"])


def check(script: Path) -> None:
    """shellcheck finds nothing; values in single quotes may hold a $ (SC2016)."""
    done = subprocess.run(
        ["shellcheck", "--severity=style", "--exclude=SC2016", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
