"""A colocated run over two nodes of Ray: each server is on the node of the rank whose devices it shares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from listening import open_to_others
from moerl_runs import ENVIRONMENT as QUIET
from moerl_runs import moerl
from ray_cluster import NodesOfRay, raylet_of
from run_checks import processes_of, rank_processes
from sglang_live import ENVIRONMENT
from waiting import eventually, status_of

from moerl.contract.disk import read_parquet
from moerl.errors import EngineError
from moerl.rollout.fleet.endpoint import read_endpoint
from moerl.rollout.sglang.server import ENDPOINT_FILE
from moerl.telemetry.sinks import read_rows

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="no environment of SGLang servers: make sglang"),
]

LONG, STEPS = 1500.0, 4
KEYS = ("recipe=tiny", "num_threads=2", "parallel.data=2", f"rl.steps={STEPS}")
COLOCATED = (
    *("rollout=sglang", "rollout.servers=2", f"rollout.environment={ENVIRONMENT}", "rollout.probe_seconds=10"),
    *("rollout.placement=colocated", "rollout.memory_share=0.4"),
)


def text_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@contextmanager
def training(run_dir: Path, cluster: NodesOfRay) -> Iterator[subprocess.Popen[bytes]]:
    """A run, once it has trained a step."""
    output, metrics = run_dir.with_suffix(".out"), run_dir / "metrics.jsonl"
    place = ("launch.on=ray", f"launch.address='{cluster.address}'", f"run_dir='{run_dir}'")
    with output.open("w") as written:
        run = subprocess.Popen(
            [sys.executable, "-m", "moerl", "train", *KEYS, *COLOCATED, *place],
            env={**os.environ, **QUIET, **cluster.variables},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: run.poll() is not None or '"rl", "step": 1' in text_of(metrics), LONG)
        assert run.poll() is None, output.read_text()
        yield run
    finally:
        run.kill()
        run.wait()


def server_of(run_dir: Path, number: int) -> int:
    """The first process of a server; 0 while there is none."""
    try:
        return read_endpoint(run_dir / "sglang" / str(number) / ENDPOINT_FILE).pid
    except EngineError:
        return 0


def tokens_of(run_dir: Path, step: int) -> dict[str, list[int]]:
    read = read_parquet(run_dir / "rollouts" / f"step-{step:06d}.parquet")
    return {each.lineage.rollout_id: each.token_ids.tolist() for each in read}


def test_a_server_is_with_its_rank_also_as_it_is_replaced_and_samples_what_one_machine_samples(tmp_path: Path) -> None:
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    # Each node has a CPU for its rank, and none for a server.
    with NodesOfRay(1, 1) as cluster, training(run_dir, cluster) as run:
        nodes = [raylet_of(pid) for _, pid in sorted(rank_processes(run_dir).items())]
        assert len(set(nodes)) == 2
        servers = [server_of(run_dir, number) for number in range(2)]
        assert [raylet_of(pid) for pid in servers] == nodes
        assert [found for pid in (run.pid, *servers) for found in open_to_others(pid)] == []
        os.kill(servers[1], signal.SIGKILL)
        eventually(lambda: run.poll() is not None or server_of(run_dir, 1) not in (0, servers[1]), LONG)
        assert raylet_of(server_of(run_dir, 1)) == nodes[1]
        said = tmp_path / "run.out"
        assert status_of(run, LONG) == 0, said.read_text()
        assert "is lost, taking another" in said.read_text()
        eventually(lambda: processes_of(run_dir) == [], 60.0)
    steps = [row for row in read_rows(run_dir / "metrics.jsonl") if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == [*range(1, STEPS + 1)]
    assert all(row["seconds/sleep"] > 0.0 for row in steps)
    assert all(row["quarantine/count"] == 0 for row in steps)
    # In float32, where the weights agree; each was sent while nobody trained.
    assert all(row["mismatch/logprob_abs_max"] <= 1e-5 for row in steps)
    command, imports = (sys.executable, "-m", "moerl"), [*map(Path, sys.path)]
    keys = (*KEYS, "rl.steps=1", f"run_dir='{alone}'")
    finished = moerl("train", *keys, command=command, path=imports, timeout_seconds=LONG)
    assert finished.status == 0, finished.output
    assert tokens_of(run_dir, 1) == tokens_of(alone, 1)
