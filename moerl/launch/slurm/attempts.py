"""Attempts of a SLURM job at one run: numbered logs, and whether the job is worth another attempt.

Batch scripts call it before and after `moerl train`::

    log=$(python -m moerl.launch.slurm.attempts begin RUN_DIR --max-requeues 3) || exit 1
    moerl train ... >"$log" 2>&1
    python -m moerl.launch.slurm.attempts end RUN_DIR --max-requeues 3 --status $?

`begin` prints the log of the new attempt. `end` ends with status 0 (finished), 75 (requeue the job) or the status with
which the job has to fail. Attempts that never came to `end`, on a node that was lost, count as well. Torch-free.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moerl.contract.files import append_line
from moerl.errors import MoerlError, told
from moerl.machine.stop_signals import INTERRUPTED, STOPPED
from moerl.reading import read_text
from moerl.trainer.checkpoint import CHECKPOINTS, checkpoint_names

FOLDER = "slurm"
"""Folder in a run directory: the script, logs, and the list of attempts."""
ATTEMPTS_FILE = "attempts.jsonl"
MAX_REQUEUES = 3
_FINAL = (2, INTERRUPTED)
"""A wrong command line or configuration, and Ctrl-C: another attempt would not help, or is not wanted."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job of SLURM and the run that it works on."""

    run_dir: Path
    """Directory of the run."""
    job_id: str
    """SLURM's id of the job, the same after a requeue; "none" outside of SLURM."""
    max_requeues: int
    """Starts of the job again, in a row, without a new checkpoint, at most."""

    @property
    def folder(self) -> Path:
        return self.run_dir / FOLDER

    def log(self, attempt: int) -> Path:
        return self.folder / f"attempt-{attempt:03d}.log"

    def newest(self) -> str:
        """Returns the name of the newest checkpoint; an empty text before the first."""
        return (checkpoint_names(self.run_dir / CHECKPOINTS) or [""])[-1]

    def attempts(self) -> list[dict[str, Any]]:
        """Returns the rows that were written when attempts began, of all jobs of this run.

        Raises:
            MoerlError: the file is damaged.
        """
        return [row for row in _rows(self.folder / ATTEMPTS_FILE) if row["event"] == "begin"]


def last_attempt(run_dir: Path) -> dict[str, Any] | None:
    """Returns the last row about a run's attempts, of event "begin" or "end"; None before the first.

    Raises:
        MoerlError: the file is damaged.
    """
    rows = _rows(run_dir / FOLDER / ATTEMPTS_FILE)
    return rows[-1] if rows else None


def begin(job: Job, *, restarts: int) -> Path:
    """Notes a new attempt; returns its log, which does not exist yet.

    Args:
        restarts: how often SLURM has started the job again.

    Raises:
        MoerlError: too many attempts before it made no progress.
    """
    _refuse_without_progress(job)
    attempt = max((int(row["attempt"]) for row in job.attempts()), default=0) + 1
    _note(job, attempt, "begin", {"restarts": restarts, "node": socket.gethostname(), "checkpoint": job.newest()})
    return job.log(attempt)


def end(job: Job, status: int) -> int:
    """Notes how the latest attempt ended; returns the exit status of the batch script, 75 to be requeued.

    Args:
        status: of `moerl train`, as the shell has it.

    Raises:
        MoerlError: the job made no progress too often to be requeued, or no attempt was begun.
    """
    attempts = job.attempts()
    if not attempts:
        raise MoerlError("no attempt was begun", seen=job.folder, expected="`begin` before `end`")
    attempt = int(attempts[-1]["attempt"])
    code = status if status == 0 or status in _FINAL else STOPPED
    _note(job, attempt, "end", {"status": status, "code": code, "checkpoint": job.newest()})
    if code == STOPPED:
        _refuse_without_progress(job)
    return code


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        # The last line has no end if a full disk broke it off.
        rows = [json.loads(line) for line in read_text(file).split("\n")[:-1]]
        for row in rows:
            if row["event"] not in ("begin", "end") or int(row["attempt"]) < 1 or not isinstance(row["job"], str):
                raise ValueError(f"event {row['event']!r}, attempt {row['attempt']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoerlError(
            f"{file} cannot be read",
            seen=f"{type(error).__name__}: {error}",
            expected="a JSON object a line",
            remedy="move it away: attempts are then counted from 1 again",
        ) from error
    return rows


def _refuse_without_progress(job: Job) -> None:
    newest, attempts = job.newest(), job.attempts()
    # Attempts of this job in a row, up to the latest, since which no checkpoint was written.
    is_in_vain = [row["job"] == job.job_id and row["checkpoint"] == newest for row in reversed(attempts)]
    count = [*is_in_vain, False].index(False)
    if count <= job.max_requeues:
        return
    log = job.log(int(attempts[-1]["attempt"]))
    raise MoerlError(
        f"job {job.job_id} makes no progress and is not requeued",
        seen=f"{count} attempts in a row without a new checkpoint, "
        + (f"the newest is {newest}" if newest else "none was written yet"),
        expected=f"at most {job.max_requeues} requeues without one",
        remedy=f"read {log}, and {job.folder / ATTEMPTS_FILE} for how each attempt ended; mend the cause"
        " and submit the job again",
    )


def _note(job: Job, attempt: int, event: str, facts: Mapping[str, object]) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    row = {"attempt": attempt, "event": event, "job": job.job_id, "at": at, **facts}
    append_line(job.folder / ATTEMPTS_FILE, json.dumps(row))


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command; returns its exit status, 1 if the job has to fail."""
    parser = argparse.ArgumentParser(prog="python -m moerl.launch.slurm.attempts", allow_abbrev=False)
    parser.add_argument("event", choices=("begin", "end"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--max-requeues", type=int, default=MAX_REQUEUES)
    parser.add_argument("--status", type=int, help="of the attempt that ended")
    options = parser.parse_args(argv)
    if options.event == "end" and options.status is None:
        parser.error("end needs --status")
    job = Job(options.run_dir, environment.get("SLURM_JOB_ID", "none"), options.max_requeues)
    try:
        if options.event == "begin":
            print(begin(job, restarts=int(environment.get("SLURM_RESTART_COUNT", "0"))))
            return 0
        code = end(job, options.status)
    except (MoerlError, OSError) as error:
        print(f"error: {told(error)}", file=sys.stderr)
        return 1
    ended = f"attempt {job.attempts()[-1]['attempt']} ended with status {options.status}"
    follows = {0: "the run is finished", STOPPED: "requeue"}.get(code, "the job ends")
    print(f"{ended}, newest checkpoint {job.newest() or 'none'}: {follows}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
