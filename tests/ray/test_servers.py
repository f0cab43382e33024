"""SGLang servers of a run as actors of a Ray cluster, one of whose nodes is lost while the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from listening import listening, open_to_others
from moerl_runs import ENVIRONMENT as QUIET
from moerl_runs import rows
from ray_cluster import NodesOfRay, raylet_of
from run_checks import processes_of, rank_processes
from sglang_live import ENVIRONMENT
from waiting import eventually, status_of

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.rollout.fleet.endpoint import read_endpoint
from moerl.rollout.sglang.server import ENDPOINT_FILE

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="no environment of SGLang servers: make sglang"),
]
LONG, STEPS = 1500.0, 16


def text_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@contextmanager
def training(run_dir: Path, cluster: NodesOfRay, *keys: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run with two servers, once it has trained two steps."""
    output = run_dir.with_suffix(".out")
    words = (
        *("recipe=tiny", "num_threads=2", "rollout=sglang", "rollout.servers=2", f"rollout.environment={ENVIRONMENT}"),
        *("buffer.max_staleness=1", "rollout.probe_seconds=10", f"run_dir='{run_dir}'"),
        *("launch.on=ray", f"launch.address='{cluster.address}'", *keys),
    )
    with output.open("w") as written:
        run = subprocess.Popen(
            [sys.executable, "-m", "moerl", "train", *words],
            env={**os.environ, **QUIET, **cluster.variables},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        metrics = run_dir / "metrics.jsonl"
        eventually(lambda: run.poll() is not None or '"rl", "step": 2' in text_of(metrics), LONG)
        assert run.poll() is None, output.read_text()
        yield run
    finally:
        run.kill()
        run.wait()


def nodes_of(run_dir: Path) -> tuple[int, set[int]]:
    """The nodes of the rank, and of the servers."""
    [rank] = rank_processes(run_dir).values()
    return raylet_of(rank), {raylet_of(pid) for pid in servers_of(run_dir)}


def servers_of(run_dir: Path) -> list[int]:
    """The first process of each server."""
    return [read_endpoint(run_dir / "sglang" / str(number) / ENDPOINT_FILE).pid for number in range(2)]


def test_nobody_else_reaches_a_run_that_goes_on_where_a_node_with_a_server_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # The rank, of two CPUs, is on the first node; a server on each.
    with NodesOfRay(4, 1) as cluster, training(run_dir, cluster, f"rl.steps={STEPS}") as run:
        of_rank, of_servers = nodes_of(run_dir)
        ours = [run.pid, *rank_processes(run_dir).values(), *servers_of(run_dir)]
        assert all(listening(pid) for pid in servers_of(run_dir))
        assert [found for pid in ours for found in open_to_others(pid)] == []
        [lost, *_] = of_servers - {of_rank}
        os.kill(lost, signal.SIGKILL)
        said = tmp_path / "run.out"
        assert status_of(run, LONG) == 0, said.read_text()
        assert "is lost, taking another" in said.read_text()
        eventually(lambda: processes_of(run_dir) == [], 60.0)
    assert [row["step"] for row in rows(run_dir) if row["stage"] == "rl"] == [*range(1, STEPS + 1)]
    ledger = Ledger.restored(json.loads((run_dir / LEDGER_FILE).read_text()))
    assert ledger.pending == 0
    assert ledger.issued == ledger.trained + ledger.filtered.total() + ledger.quarantined.total()


def test_a_run_ends_at_once_where_the_node_of_its_rank_is_lost_and_its_servers_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # The rank is on the second node: with the first, Ray would end the controller.
    with NodesOfRay(1, 4) as cluster, training(run_dir, cluster, "rl.steps=200") as run:
        of_rank, _ = nodes_of(run_dir)
        os.kill(of_rank, signal.SIGKILL)
        assert status_of(run, LONG) == 1
        said = text_of(tmp_path / "run.out")
        assert "error: rank 0 of the trainer was lost" in said
        assert said.endswith(f"moerl train resume={run_dir}\n")
        eventually(lambda: processes_of(run_dir) == [], 60.0)
