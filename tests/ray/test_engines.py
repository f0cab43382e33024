"""An embedded engine as an actor of a Ray cluster: the same digits, and what becomes of a run that loses it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from moerl_runs import ENVIRONMENT, rows, summary
from ray_cluster import NodesOfRay, raylet_of
from run_checks import processes_at, rank_processes
from waiting import eventually, is_alive, status_of

from moerl.buffer.ledger import LEDGER_FILE, Ledger

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

LONG = 900.0
# The ranks fill the first node, and the engine waits for another one with two CPUs.
KEYS = ("recipe=tiny", "num_threads=2", "parallel.data=2", "rollout.placement=process")
CPUS = 2


def on(cluster: NodesOfRay) -> list[str]:
    return ["launch.on=ray", f"launch.address='{cluster.address}'"]


def output_of(run_dir: Path) -> str:
    return run_dir.with_suffix(".out").read_text()


@contextmanager
def training(
    *arguments: str, run_dir: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    with run_dir.with_suffix(".out").open("a") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "moerl", "train", *arguments],
            env={**os.environ, **ENVIRONMENT, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def trained(run_dir: Path, *keys: str, variables: Mapping[str, str] | None = None) -> None:
    with training(*KEYS, f"run_dir='{run_dir}'", *keys, run_dir=run_dir, variables=variables) as run:
        assert status_of(run, LONG) == 0, output_of(run_dir)


def engine_of(run_dir: Path) -> int:
    [pid] = processes_at(run_dir / "logs" / "engine.log", b"moerl.rollout.engine_process.process")
    return pid


def until_it_learns(run: subprocess.Popen[str], run_dir: Path, cluster: NodesOfRay) -> tuple[int, list[int]]:
    """The engine's process, which is on a second node, and those of the ranks, once there was a step."""
    eventually(lambda: run.poll() is not None or "cold start:" in output_of(run_dir), LONG)
    cluster.add_node(CPUS)
    metrics = run_dir / "metrics.jsonl"
    eventually(lambda: run.poll() is not None or (metrics.exists() and '"rl", "step": 1' in metrics.read_text()), LONG)
    assert run.poll() is None, output_of(run_dir)
    engine, ranks = engine_of(run_dir), list(rank_processes(run_dir).values())
    assert {raylet_of(rank) for rank in ranks}.isdisjoint({raylet_of(engine)})
    return engine, ranks


def test_an_engine_on_another_node_than_the_ranks_samples_what_one_here_does(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    trained(local)
    with NodesOfRay(CPUS) as cluster:
        words = [*KEYS, f"run_dir='{remote}'", *on(cluster)]
        with training(*words, run_dir=remote, variables=cluster.variables) as run:
            engine, _ = until_it_learns(run, remote, cluster)
            assert status_of(run, LONG) == 0, output_of(remote)
        eventually(lambda: not is_alive(engine), seconds=60.0)
    assert rows(remote) == rows(local)
    assert summary(remote) == summary(local)


def test_a_cluster_of_the_runs_own_has_room_for_its_engine(tmp_path: Path) -> None:
    trained(tmp_path / "run", "launch.on=ray", "rl.steps=1")


LOSSES = {
    "process": r"the engine's process is gone; seen: process \d+: killed by SIGKILL.*on node 127\.0\.0\.2",
    # The second if the node is lost while a rank pushes a bucket.
    "node": r"engine's process is gone; seen: its actor.*on node 127\.0\.0\.2|the engine's process is gone",
    "rank": r"rank 0 of the trainer was lost in '\w+'; seen: killed by SIGKILL, on node",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_that_loses_an_engine_elsewhere_or_its_ranks_says_so_and_goes_on(tmp_path: Path, loss: str) -> None:
    run_dir = tmp_path / "run"
    with NodesOfRay(CPUS) as cluster:
        words = [*KEYS, "rl.steps=12", "buffer.max_staleness=1", f"run_dir='{run_dir}'", *on(cluster)]
        with training(*words, run_dir=run_dir, variables=cluster.variables) as run:
            engine, ranks = until_it_learns(run, run_dir, cluster)
            if loss == "node":
                cluster.remove_node()
            else:
                os.kill(engine if loss == "process" else rank_processes(run_dir)[0], signal.SIGKILL)
            assert status_of(run, LONG) not in (0, None)
        eventually(lambda: not any(is_alive(pid) for pid in (engine, *ranks)), seconds=60.0)
    assert re.search(LOSSES[loss], output_of(run_dir))

    with training(f"resume={run_dir}", "launch.on=local", "launch.address=null", run_dir=run_dir) as run:
        assert status_of(run, LONG) == 0, output_of(run_dir)
    ledger = Ledger.restored(json.loads((run_dir / LEDGER_FILE).read_text()))
    assert not ledger.pending
    assert [row["step"] for row in rows(run_dir) if row["stage"] == "rl"] == list(range(1, 13))
