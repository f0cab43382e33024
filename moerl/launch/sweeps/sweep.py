"""The loop of a sweep: it starts runs when slots of the host are free, and notes how each run ends."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.errors import ending
from moerl.launch.sweeps.hosts import RunHost, SweepJob
from moerl.launch.sweeps.manifest import Manifest, State, SweepRun, write_manifest
from moerl.machine.stop_signals import INTERRUPTED, STOPPED, StopRequest
from moerl.reading import open_regular
from moerl.telemetry.terminal import excerpt

POLL_SECONDS = 0.1
_ERROR = re.compile(r"(?:\[rank\d+\]: )?(error: .*|[\w.]*(?:Error|Exception): .*)$")
"""Pattern of a line in which moerl reports an error, or of the last line of a traceback; torch prints the rank before
it, if there are several."""


class Sweep:
    """Runs of a manifest, on a host.

    Args:
        folder: directory of the sweep; its manifest is written whenever a run begins or ends.
        stop: stop signal that this process got, if any.
        notify: called with each line to show.
    """

    def __init__(
        self, manifest: Manifest, folder: Path, host: RunHost, stop: StopRequest, notify: Callable[[str], None]
    ) -> None:
        self._manifest, self._folder, self._host, self._stop, self._notify = manifest, folder, host, stop, notify
        self._under_way: dict[str, SweepRun] = {}
        self._waiting: list[SweepRun] = []
        self._log_starts: dict[str, int] = {}
        self._passed_on = False

    def run(self) -> None:
        """Runs all runs that are not finished, and returns when they have ended; the manifest says how.

        After the first stop signal, runs under way get SIGTERM and end at their next safe point, and no more are
        started. Ctrl-C after that signal is passed on, and ends them at once; another one kills them.

        Raises:
            KeyboardInterrupt: runs were killed. MoerlError: the manifest cannot be written.
        """
        for run in self._manifest.runs:
            if (self._folder / run.name / SUMMARY_FILE).exists():
                run.state, run.status = "finished", 0
                self._notify(f"{run.name}: was finished before")
            else:
                run.state, run.status = "waiting", None
                self._waiting.append(run)
        write_manifest(self._manifest, self._folder)
        num_interrupts = 0
        with ending(self._end):
            while self._under_way or (self._waiting and not self._stop.signal):
                try:
                    self._turn()
                except KeyboardInterrupt:
                    num_interrupts += 1
                    if num_interrupts > 1:
                        raise
                    self._host.stop(signal.SIGINT)

    def _end(self) -> None:
        self._host.close()
        for run in self._under_way.values():
            run.state = "stopped"
        write_manifest(self._manifest, self._folder)

    def _turn(self) -> None:
        for name, status in self._host.ended().items():
            self._note(self._under_way.pop(name), status)
        if self._stop.signal:
            if not self._passed_on:
                self._passed_on = True
                # Not SIGINT: if Ctrl-C had come to the runs, too, a second SIGINT would end them at once.
                self._host.stop(signal.SIGTERM)
        else:
            while self._waiting and len(self._under_way) < self._host.slots:
                self._start(self._waiting.pop(0))
        time.sleep(POLL_SECONDS)

    def _start(self, run: SweepRun) -> None:
        job = job_of(run, self._manifest, self._folder)
        self._log_starts[run.name] = job.log.stat().st_size if job.log.exists() else 0
        try:
            self._host.start(job)
        except OSError as error:
            run.state = "failed"
            self._notify(f"{run.name}: could not be started: {error}")
        else:
            run.state = "running"
            self._under_way[run.name] = run
            number = self._manifest.runs.index(run) + 1
            self._notify(f"{run.name}: started, {number} of {len(self._manifest.runs)}; log: {job.log}")
        write_manifest(self._manifest, self._folder)

    def _note(self, run: SweepRun, status: int) -> None:
        run.state, run.status = state_after(status, was_told=bool(self._stop.signal)), status
        because = ""
        if run.state == "failed":
            said = last_words(job_of(run, self._manifest, self._folder).log, self._log_starts[run.name])
            because = f" with status {status}: {said}"
        self._notify(f"{run.name}: {run.state}{because}")
        write_manifest(self._manifest, self._folder)


def state_after(status: int, *, was_told: bool) -> State:
    """Returns the state of a run whose process has ended. was_told: True if a signal to stop was passed on to it."""
    if status == 0:
        return "finished"
    # A run that was only starting has no handler yet, and dies of the signal.
    return "stopped" if status in (STOPPED, INTERRUPTED) or (status < 0 and was_told) else "failed"


def job_of(run: SweepRun, manifest: Manifest, folder: Path) -> SweepJob:
    """Returns the command line of one run: it starts the run, or goes on with it."""
    options = [] if manifest.config_dir is None else ["--config-dir", manifest.config_dir]
    overrides = [*overrides_of(run, manifest, folder), "resume=auto"]
    return SweepJob(run.name, ["train", *options, *overrides], folder / "logs" / f"{run.name}.log")


def overrides_of(run: SweepRun, manifest: Manifest, folder: Path) -> list[str]:
    """Returns the overrides of one run, without `resume`."""
    run_dir = str(folder / run.name).replace("'", "\\'")
    return [*manifest.common, *run.overrides, f"run_dir='{run_dir}'"]


def last_words(log: Path, start: int) -> str:
    """Returns the last error that a run printed from byte `start` of its log on, else its last line, without control
    characters; an empty text if it printed nothing."""
    text = ""
    if log.exists():
        with open_regular(log) as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
    lines = text.strip().splitlines() or [""]
    return excerpt(next((match[1] for line in reversed(lines) if (match := _ERROR.match(line))), lines[-1]))


def exit_status(manifest: Manifest, *, is_interrupt: bool) -> int:
    """Returns 0 if all runs are finished, 1 if one failed, else the status of a run that a signal stopped."""
    states = {run.state for run in manifest.runs}
    if states == {"finished"}:
        return 0
    return 1 if "failed" in states else INTERRUPTED if is_interrupt else STOPPED
