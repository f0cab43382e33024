"""A sweep as jobs of SLURM: one for each run, and one after them that makes the report. Torch-free.

The last job runs ``python -m moerl.launch.slurm.sweeps SWEEP_DIR``: it notes in the sweep's manifest how each run
ended, shows the table, and writes the page. Its status is 0 if all runs are finished, 1 if one failed, else 75.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.errors import MoerlError, told
from moerl.launch.report import report_parser, run_report
from moerl.launch.slurm.attempts import last_attempt
from moerl.launch.slurm.submit import latest_job
from moerl.launch.sweeps.command import show
from moerl.launch.sweeps.manifest import Manifest, read_manifest, write_manifest
from moerl.launch.sweeps.sweep import exit_status, state_after


def note_states(manifest: Manifest, folder: Path, queued: set[str]) -> None:
    """Sets the state of each run, by its directory and the queue.

    Args:
        queued: ids of jobs that wait or run.

    Raises:
        MoerlError: a run's list of attempts is damaged.
    """
    for run in manifest.runs:
        run.status = None
        run_dir = folder / run.name
        attempt, job = last_attempt(run_dir), latest_job(run_dir)
        if (run_dir / SUMMARY_FILE).exists():
            run.state, run.status = "finished", 0
        elif job in queued:
            # An attempt of an earlier job says nothing of this one.
            run.state = "running" if attempt is not None and attempt["job"] == job else "waiting"
        elif attempt is None:
            run.state = "waiting"
        elif attempt["event"] == "end":
            run.state, run.status = state_after(int(attempt["status"]), was_told=False), int(attempt["status"])
        else:
            # The attempt was cancelled, or its node was lost: the run can go on.
            run.state = "stopped"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    folder = Path(arguments[0])
    try:
        manifest = read_manifest(folder)
        note_states(manifest, folder, queued=set())
        write_manifest(manifest, folder)
        show(manifest, folder)
        run_report(report_parser().parse_args([str(folder)]))
    except (MoerlError, OSError) as error:
        print(f"error: {told(error)}", file=sys.stderr)
        return 1
    return exit_status(manifest, is_interrupt=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
