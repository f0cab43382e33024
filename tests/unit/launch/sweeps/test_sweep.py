"""The loop of a sweep, with child processes that take the command line of a run and train nothing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from waiting import eventually, is_alive, run_within

from moerl.config.compose import split_sweep
from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.launch.sweeps.hosts import LOCAL_PROGRAM, LocalHost, SweepJob
from moerl.launch.sweeps.manifest import Manifest, new_manifest, read_manifest
from moerl.launch.sweeps.sweep import Sweep, exit_status, job_of, last_words
from moerl.machine.stop_signals import STOPPED, StopRequest

CHILD = """
import os, pathlib, signal, sys
words = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
run_dir = pathlib.Path(words["run_dir"].strip("'"))
run_dir.mkdir(exist_ok=True)
with (run_dir / "starts").open("a") as file:
    file.write(words["resume"] + "\\n")
if words["seed"] == "2":
    print("error: planted\\x1b[2J")
    sys.exit(1)
if words["seed"] in "89" and not (run_dir / "second").exists():
    (run_dir / "second").touch()
    def stop(number, frame):
        print("stopped by", signal.Signals(number).name, flush=True)
        os._exit(75)
    def wait(number, frame):
        print("waits for another", flush=True)
    signal.signal(signal.SIGTERM, stop if words["seed"] == "9" else wait)
    signal.signal(signal.SIGINT, wait)
    print("ready", flush=True)
    while True:
        signal.pause()
(run_dir / "summary.json").write_text("{}")
"""
"""Fails for seed 2; for seed 9 it waits the first time until it is told to stop, for seed 8 until it is killed."""
PROGRAM = (sys.executable, "-c", CHILD)


class Session:
    """A sweep in a folder, and what it said. stop_at: text of a log line at which the sweep is told to stop."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self.said, self.stop = folder, list[str](), StopRequest()
        self.manifest = new_manifest(*split_sweep(overrides), None)
        self.host = LocalHost(2, PROGRAM)

    def run(self) -> Manifest:
        Sweep(self.manifest, self.folder, self.host, self.stop, self.said.append).run()
        return read_manifest(self.folder)

    def states(self) -> list[str]:
        return [run.state for run in read_manifest(self.folder).runs]


def starts(folder: Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text().split()) for path in sorted(folder.glob("*/starts"))}


def test_runs_that_fail_do_not_end_a_sweep(tmp_path: Path) -> None:
    session = Session(tmp_path, "seed=1,2,3", "keep_routing.mode=off,rollout")
    manifest = session.run()
    assert session.states() == ["finished", "finished", "failed", "failed", "finished", "finished"]
    assert [run.status for run in manifest.runs] == [0, 0, 1, 1, 0, 0]
    assert exit_status(manifest, is_interrupt=False) == 1
    assert "002_seed-2_mode-off: failed with status 1: error: planted\\x1b[2J" in session.said
    assert starts(tmp_path) == {run.name: 1 for run in manifest.runs}


def test_a_sweep_that_goes_on_starts_only_what_is_not_finished(tmp_path: Path) -> None:
    Session(tmp_path, "seed=1,2,3").run()
    again = Session(tmp_path, "seed=1,2,3")
    assert again.run().runs[1].state == "failed"
    assert starts(tmp_path) == {"000_seed-1": 1, "001_seed-2": 2, "002_seed-3": 1}
    assert "000_seed-1: was finished before" in again.said


def test_what_the_run_directory_says_counts_and_not_the_manifest(tmp_path: Path) -> None:
    Session(tmp_path, "seed=1,3").run()
    (tmp_path / "000_seed-1" / SUMMARY_FILE).unlink()
    Session(tmp_path, "seed=1,3").run()
    assert starts(tmp_path) == {"000_seed-1": 2, "001_seed-3": 1}


class Stopping(LocalHost):
    """Tells the sweep to stop when its runs have begun to wait."""

    def __init__(self, session: Session, numbers: list[signal.Signals]) -> None:
        super().__init__(1, PROGRAM)
        self.session, self.numbers, self.stops = session, numbers, list[signal.Signals]()

    def ended(self):
        logs = "".join(path.read_text() for path in self.session.folder.glob("logs/*"))
        heard = logs.count("ready") + logs.count("waits for another")
        if self.numbers and heard > len(self.stops):
            self.session.stop.receive(self.numbers.pop(0))
        return super().ended()

    def stop(self, number: signal.Signals) -> None:
        self.stops.append(number)
        super().stop(number)


def test_a_stop_signal_is_passed_on_and_the_sweep_goes_on_later(tmp_path: Path) -> None:
    session = Session(tmp_path, "seed=9,3")
    session.host = Stopping(session, [signal.SIGTERM])
    manifest = session.run()
    assert [(run.state, run.status) for run in manifest.runs] == [("stopped", STOPPED), ("waiting", None)]
    assert exit_status(manifest, is_interrupt=False) == STOPPED
    assert exit_status(manifest, is_interrupt=True) == 130
    assert "stopped by SIGTERM" in (tmp_path / "logs" / "000_seed-9.log").read_text()
    assert [run.state for run in Session(tmp_path, "seed=9,3").run().runs] == ["finished", "finished"]
    assert starts(tmp_path) == {"000_seed-9": 2, "001_seed-3": 1}


def test_ctrl_c_three_times_leaves_no_process(tmp_path: Path) -> None:
    session = Session(tmp_path, "seed=8,3")
    host = session.host = Stopping(session, [signal.SIGINT] * 3)
    with pytest.raises(KeyboardInterrupt):
        session.run()
    # Ctrl-C that came to a run, too, would be its second one.
    assert host.stops == [signal.SIGTERM, signal.SIGINT]
    assert host.ended() == {}
    assert session.states() == ["stopped", "waiting"]


def test_a_run_that_is_killed_has_failed(tmp_path: Path) -> None:
    session = Session(tmp_path, "seed=1,3")
    session.host = LocalHost(1, (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    assert [(run.state, run.status) for run in session.run().runs] == [("failed", -9), ("failed", -9)]


def test_a_host_that_refuses_a_run_has_failed_it(tmp_path: Path) -> None:
    session = Session(tmp_path, "seed=1,3")
    session.host = LocalHost(1, (str(tmp_path / "nothing"),))
    session.run()
    assert session.states() == ["failed", "failed"]
    assert "could not be started" in session.said[0]


def test_no_more_runs_than_slots_are_under_way(tmp_path: Path) -> None:
    class Counting(LocalHost):
        most = 0

        def start(self, job: SweepJob) -> None:
            super().start(job)
            self.most = max(self.most, len(self._processes))

    session = Session(tmp_path, "seed=1,3,4,5,6")
    host = session.host = Counting(2, PROGRAM)
    session.run()
    assert host.most == 2


def test_the_command_line_of_a_run_starts_it_or_goes_on_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "it's"
    manifest = new_manifest(*split_sweep(["recipe=tiny", "seed=1,2"]), tmp_path)
    words = list(job_of(manifest.runs[0], manifest, folder).arguments)
    quoted = str(folder / "000_seed-1").replace("'", "\\'")
    assert words == [
        *["train", "--config-dir", str(tmp_path.resolve()), "recipe=tiny", "seed=1"],
        *[f"run_dir='{quoted}'", "resume=auto"],
    ]


def test_the_last_words_of_a_run_are_its_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log, 0) == ""
    log.write_text("error: of yesterday\n")
    assert last_words(log, len("error: of yesterday\n")) == ""
    log.write_text("step 1\nerror: of yesterday\nstep 2\nerror: disk full\ngo on: moerl train resume=x\n")
    assert last_words(log, 0) == "error: disk full"
    log.write_text("[rank0]:   raise\n[rank0]: ValueError: planted\n[rank0]: go on from the last checkpoint: moerl\n")
    assert last_words(log, 0) == "ValueError: planted"
    log.write_text("step 1\nKilled \x1b[2J\n")
    assert last_words(log, 0) == "Killed \\x1b[2J"


WAITING = LOCAL_PROGRAM[-1].replace(
    "from moerl.cli import main",
    "import os, time\n\ndef main():\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n",
)
STARTER = """
import os, sys, time
from pathlib import Path
from moerl.launch.sweeps.hosts import LOCAL_PROGRAM, LocalHost, SweepJob
log = Path(sys.argv[1])
LocalHost(1, (sys.executable, "-c", sys.argv[2])).start(SweepJob("one", [], log))
while not log.read_text().endswith("\\n"):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


def test_runs_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    assert "time.sleep" in WAITING
    log = tmp_path / "log"
    run_within([sys.executable, "-c", STARTER, str(log), WAITING], 120)
    eventually(lambda: not is_alive(int(log.read_text())))
