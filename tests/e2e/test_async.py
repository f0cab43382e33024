"""Sampling beside the training: bounded, accounted for, stopped, killed and resumed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from moerl_runs import Fault, Finished, Runs, rows
from waiting import eventually

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.contract.disk import read_parquet

STEPS, PER_STEP = 5, 16
IN_PROCESS = ("recipe=tiny", "rollout.placement=process", "buffer.max_staleness=1", f"rl.steps={STEPS}")
STEP = "moerl.orchestration.rl:RLStage._update"


def at(name: str, call: int, **arguments: object) -> Fault:
    return name, {"place": STEP, "call": call, **arguments}


def orphans() -> list[Path]:
    """Engines and ranks whose parent is gone, of any run: for a moment there may be some of another test."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == "1" and any(
            name in line for name in (b"moerl.rollout.engine_process.process", b"moerl.ranks.process")
        ):
            found.append(entry)
    return found


def assert_whole(run: Path, finished: Finished) -> None:
    """Every rollout is trained once, none is older than the bound, and the steps are all there."""
    assert finished.status == 0, finished.output
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    assert (ledger.issued, ledger.trained, ledger.pending) == (STEPS * PER_STEP, STEPS * PER_STEP, 0)
    steps = [row for row in rows(run) if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    trained: list[str] = []
    for step in range(1, STEPS + 1):
        for trajectory in read_parquet(run / "rollouts" / f"step-{step:06d}.parquet"):
            trained.append(trajectory.lineage.rollout_id)
            versions = trajectory.policy_versions[trajectory.sampled]
            assert (np.diff(versions) >= 0).all()
            assert step - 2 <= versions[0] <= versions[-1] <= step - 1
    assert len(trained) == len(set(trained)) == STEPS * PER_STEP
    eventually(lambda: not orphans())


EVERY_SECOND = ("weights.every=2", "evaluation.every=3")


def assert_engines_were_updated_every_second_step_and_before_evaluations(run: Path, resumed_at: int = 0) -> None:
    """resumed_at: step whose weights an engine begins with."""
    steps = [row for row in rows(run) if row["stage"] == "rl"]
    assert [row["weights/version"] for row in steps] == [0, 2, 3, 4, 5]
    assert ["weights/bytes" in row for row in steps] == [False, True, True, True, True]
    sampled = {
        int(version)
        for file in (run / "rollouts").iterdir()
        for t in read_parquet(file)
        for version in t.policy_versions[t.sampled]
    }
    assert sampled <= {0, 2, 3, 4, resumed_at}


@pytest.mark.parametrize(
    ("fault", "status", "options"),
    [
        pytest.param(at("kill", 3), -signal.SIGKILL, EVERY_SECOND, id="killed"),
        pytest.param(at("tell", 2, signal_name="SIGTERM"), 75, (), id="told to stop", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_samples_ahead_is_resumed_without_losing_or_repeating_a_rollout(
    fault: Fault, status: int, options: tuple[str, ...], forked: Runs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = forked.run("train", *IN_PROCESS, *options, f"run_dir='{run}'", fault=fault)
    assert stopped.status == status, stopped.output
    assert "no token that is trained is older than 1 versions" in stopped.output
    eventually(lambda: not orphans())
    told = forked.run("status", str(run))
    assert told.status == 0
    assert "stopped; go on with" in told.output
    resumed = forked.run("train", f"resume={run}")
    assert "finished groups that are taken from the journal: " in resumed.output
    assert_whole(run, resumed)
    assert not list((run / "journal").iterdir())
    if options == EVERY_SECOND:
        [step] = re.findall(r"rl: going on from step (\d)", resumed.output)
        assert_engines_were_updated_every_second_step_and_before_evaluations(run, int(step))


@pytest.mark.slow
def test_engines_are_updated_after_every_second_step_and_before_an_evaluation(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run("train", *IN_PROCESS, *EVERY_SECOND, f"run_dir='{run}'")
    assert_whole(run, finished)
    assert_engines_were_updated_every_second_step_and_before_evaluations(run)


@pytest.mark.slow
def test_two_ranks_train_what_an_engine_beside_them_samples_ahead(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sizes = ("parallel.expert=2", "rl.minibatches=2", "buffer.window=3")
    finished = forked.run("train", *IN_PROCESS, *sizes, f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["staleness/age_max"] for row in lines if row["stage"] == "rl") <= 2
    eventually(lambda: not orphans())
