"""Stop signals that all processes of a run get at once, as from systemd, srun, scancel or any stop of a cgroup: the
controller writes its checkpoint, as if it alone had been told."""

from __future__ import annotations

from pathlib import Path

import pytest
from moerl_runs import Fault, Finished, Runs, Sums
from waiting import eventually, is_alive

START_OF_RANKS = "moerl.ranks.processes:Processes.replies"
STEP_OF_THE_COLD_START = "moerl.orchestration.sft:_step"
START_OF_THE_ENGINE = "moerl.orchestration.commands:open_engine"
UPDATE_OF_THE_ENGINE = "moerl.rollout.engine_process.engine:ProcessEngine.begin_update"
SAMPLE, EVALUATE = "moerl.orchestration.rl:with_advantages", "moerl.orchestration.rl:evaluate"


def everyone(place: str, *signals: str, call: int = 1, after: bool = False) -> Fault:
    names = signals or ("SIGTERM",)
    return "tell_everyone", {"place": place, "signal_names": names, "call": call, "after": after}


def told(finished: Finished) -> list[int]:
    """Processes that were told, all of which are gone."""
    (line,) = [line for line in finished.output.splitlines() if line.startswith("told ")]
    pids = [int(word) for word in line.split()[1:]]
    eventually(lambda: not any(map(is_alive, pids)))
    return pids


# Where, and after how many steps the run has stopped; at least so many processes were told.
STOPS = [
    (everyone(START_OF_RANKS), "stopped before the next step", 3),
    (everyone(STEP_OF_THE_COLD_START, "SIGTERM", "SIGTERM", call=3), "stopped after step 3 of stage sft", 4),
    (everyone(START_OF_THE_ENGINE, after=True), "stopped before the next step", 4),
    (everyone(SAMPLE, "SIGHUP", call=2), "stopped after step 1 of stage rl", 4),
    (everyone(UPDATE_OF_THE_ENGINE, "SIGTERM", "SIGINT", call=2), "of stage rl", 4),
    (everyone(EVALUATE, "SIGUSR1"), "of stage rl", 4),
]


@pytest.mark.slow
def test_a_run_of_many_processes_that_are_all_told_to_stop_stops_with_a_checkpoint_and_goes_on(
    forked: Runs, sums: Sums, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kinds = ("parallel.expert=2", "rollout.placement=process", "buffer.max_staleness=1", "buffer.window=5")
    arguments = [*sums.train(run), *kinds]
    for fault, where, num_told in STOPS:
        stopped = forked.run(*arguments, fault=fault, path=[sums.folder])
        assert stopped.status == 75, (fault, stopped.output)
        assert where in stopped.output, (fault, stopped.output)
        assert len(told(stopped)) >= num_told
        arguments = ["train", f"resume={run}"]
    finished = forked.run(*arguments, path=[sums.folder])
    assert finished.status == 0, finished.output
    ledger = (run / "ledger.json").read_text()
    assert '"pending": {}' in ledger or '"pending": []' in ledger


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param(("SIGTERM",), marks=pytest.mark.slow),
        ("SIGINT", "SIGTERM"),
        pytest.param(("SIGTERM", "SIGINT"), marks=pytest.mark.slow),
        pytest.param(("SIGHUP", "SIGTERM"), marks=pytest.mark.slow),
    ],
)
def test_a_run_of_one_process_and_its_rewards_stops_likewise(
    signals: tuple[str, ...], forked: Runs, sums: Sums, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = forked.run(*sums.train(run), fault=everyone(SAMPLE, *signals, call=2), path=[sums.folder])
    assert stopped.status == 75, stopped.output
    assert "stopped after step 1 of stage rl" in stopped.output
    assert len(told(stopped)) >= 3


TELLS_AT_ITS_IMPORT = """
import os, pathlib, signal
marker = pathlib.Path(__file__).with_name("told")
if not marker.exists():
    marker.touch()
    pids = [os.getpid(), os.getppid()]
    while b"guard.py" in pathlib.Path(f"/proc/{pids[-1]}/cmdline").read_bytes():
        pids.append(int(pathlib.Path(f"/proc/{pids[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
    for pid in pids:
        os.kill(pid, signal.SIGTERM)

def score(row, response):
    return 0.5
"""


def test_a_run_that_is_told_while_it_gets_ready_can_be_started_again(forked: Runs, sums: Sums, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS_AT_ITS_IMPORT)
    run = tmp_path / "run"
    arguments = [*sums.train(run), "task.reward=tells:score"]
    stopped = forked.run(*arguments, path=[tmp_path])
    assert stopped.status == 75, stopped.output
    assert stopped.output.endswith("stopped before the run began: the same command starts it\n")
    assert not run.exists()
    again = forked.run(*arguments, fault=everyone(SAMPLE, call=1), path=[tmp_path])
    assert again.status == 75, again.output
