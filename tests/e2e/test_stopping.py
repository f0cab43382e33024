"""A run that is told to stop does so at a safe point, with a checkpoint, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from moerl_runs import ENVIRONMENT, DoneRun, Fault, Runs, Sums, rows
from run_checks import assert_close, assert_the_same, processes_of
from waiting import eventually, status_of

STEP_OF_THE_COLD_START = "moerl.orchestration.sft:_step"
UPDATE = "moerl.trainer.optimizer:Optimizer.update"
SAMPLE, EVALUATE = "moerl.orchestration.rl:with_advantages", "moerl.orchestration.rl:evaluate"


def tell(name: str, place: str, call: int = 1, *, after: bool = False) -> Fault:
    return "tell", {"place": place, "signal_name": name, "call": call, "after": after}


# One run, told to stop again and again: when, after how many steps it has stopped, and where it goes on then.
STOPS = [
    (tell("SIGTERM", STEP_OF_THE_COLD_START, 3), "stopped after step 3 of stage sft", "sft: going on from step 3"),
    (
        tell("SIGHUP", "moerl.orchestration.commands:open_engine"),
        "stopped before the next step",
        "sft: going on from step 6",
    ),
    (tell("SIGUSR1", SAMPLE, 2), "stopped after step 1 of stage rl", "rl: going on from step 1"),
    (tell("SIGTERM", EVALUATE), "stopped after step 2 of stage rl", "rl: going on from step 2"),
    (tell("SIGTERM", UPDATE), "stopped after step 3 of stage rl", "rl: going on from step 3"),
    (tell("SIGTERM", EVALUATE, 3, after=True), "stopped after step 5 of stage rl", "rl: going on from step 5"),
]


def test_a_run_told_to_stop_again_and_again_ends_as_if_undisturbed(
    forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments, goes_on = sums.train(run), "starting Megatron"
    for fault, where, next_start in STOPS:
        stopped = forked.run(*arguments, fault=fault, path=[sums.folder])
        assert stopped.status == 75, stopped.output
        assert goes_on in stopped.output
        assert f"{fault[1]['signal_name']}: stopping at the next safe point" in stopped.output
        assert where in stopped.output
        assert stopped.output.endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
        arguments, goes_on = ["train", f"resume={run}"], next_start
    finished = forked.run(*arguments, path=[sums.folder])
    assert finished.status == 0, finished.output
    assert goes_on in finished.output
    assert_the_same(run, undisturbed.folder)


@pytest.mark.slow
def test_a_run_told_to_stop_before_anything_was_learned_starts_again(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    begin = tell("SIGTERM", "moerl.trainer.groups:start")
    stopped = forked.run("train", "recipe=tiny", f"run_dir='{run}'", fault=begin)
    assert stopped.status == 75, stopped.output
    assert stopped.output.endswith(f"go on, nothing was saved yet: moerl train resume={run}\n")
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    assert rows(run) == rows(tiny.folder)


def test_one_command_line_starts_a_run_goes_on_with_it_and_leaves_a_finished_one_alone(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ["train", "recipe=tiny", f"run_dir='{run}'", "resume=auto"]
    stopped = forked.run(*arguments, fault=tell("SIGTERM", SAMPLE, 2))
    assert stopped.status == 75, stopped.output
    finished = forked.run(*arguments)
    assert finished.status == 0, finished.output
    assert "rl: going on from step 1" in finished.output
    assert rows(run) == rows(tiny.folder)
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = forked.run(*arguments)
    assert again.status == 0, again.output
    assert again.output == f"the run in {run} is finished: nothing to do\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files
    killed = forked.run(*arguments, "rl.steps=4", fault=("kill", {"place": UPDATE, "call": 1}))
    assert killed.status == -signal.SIGKILL, killed.output
    longer = forked.run(*arguments, "rl.steps=4")
    assert longer.status == 0, longer.output
    assert rows(run)[-1]["step"] == 4


@pytest.mark.slow
def test_supervised_training_alone_stops_and_goes_on(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["sft", "recipe=tiny", f"run_dir='{run}'"]
    for fault in (tell("SIGTERM", STEP_OF_THE_COLD_START, 2), tell("SIGTERM", "moerl.orchestration.commands:evaluate")):
        stopped = forked.run(*arguments, fault=fault)
        assert stopped.status == 75, stopped.output
        arguments = ["sft", f"resume={run}"]
    finished = forked.run(*arguments)
    assert finished.status == 0, finished.output
    weights = "cold_start/model.safetensors"
    assert (run / weights).read_bytes() == (tiny.folder / weights).read_bytes()
    assert [(row["stage"], row["step"]) for row in rows(run)] == [
        *(("sft", i) for i in (1, 2, 3, 4)),
        ("evaluation", 0),
    ]


@pytest.mark.slow
def test_two_ranks_agree_on_where_they_stop_and_nobody_else_gets_the_run_directory_before(
    sums: Sums, undisturbed: DoneRun, tmp_path: Path, forked: Runs
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    metrics = run / "metrics.jsonl"
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "moerl", *sums.train(run), "parallel.expert=2"],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(sums.folder), *sys.path])},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: metrics.exists() and '"rl", "step": 1' in metrics.read_text(), seconds=240)
        second = forked.run("train", f"resume={run}", path=[sums.folder])
        assert second.status == 2, second.output
        assert f"process {launcher.pid} on host" in second.output
        launcher.send_signal(signal.SIGUSR1)
        assert status_of(launcher, 120.0) == 75, output.read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert output.read_text().endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
    assert processes_of(run) == []
    newest = max((run / "checkpoints").iterdir())
    assert {file.name for file in newest.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert rows(run)[-1]["step"] == int(newest.name[-6:])
    finished = forked.run("train", f"resume={run}", "parallel.expert=1", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert_close(run, undisturbed.folder)


def test_a_step_that_outlasts_the_grace_time_is_given_up(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Four updates are of the cold start.
    never_ends = ("both", {"first": ("hang", {"place": UPDATE, "call": 6}), "second": tell("SIGTERM", UPDATE, 6)})
    arguments = ["train", "recipe=tiny", f"run_dir='{run}'", "checkpoint.every=1", "checkpoint.grace_seconds=0.5"]
    stopped = forked.run(*arguments, fault=never_ends)
    assert stopped.status == 75, stopped.output
    assert "SIGTERM: stopping at the next safe point, within 0.5 s;" in stopped.output
    assert "the grace time is over: stopping at once" in stopped.output
    assert stopped.output.endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
    assert processes_of(run) == []
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    assert "rl: going on from step 1" in finished.output
    assert rows(run) == rows(tiny.folder)


@pytest.mark.slow
def test_ctrl_c_stops_at_a_safe_point_and_a_second_one_at_once(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = tell("SIGINT", UPDATE, 6)
    stopped = forked.run("train", "recipe=tiny", f"run_dir='{run}'", fault=first)
    assert stopped.status == 130, stopped.output
    assert "stopped after step 2 of stage rl" in stopped.output
    assert stopped.output.endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
    twice = ("both", {"first": tell("SIGINT", UPDATE), "second": tell("SIGINT", UPDATE)})
    at_once = forked.run("train", f"resume={run}", fault=twice)
    assert at_once.status == 130, at_once.output
    assert "interrupted" in at_once.output
    assert "stopped after" not in at_once.output
    assert [row["step"] for row in rows(run) if row["stage"] == "rl"] == [1, 2]
