"""Reward functions on the nodes of a Ray cluster: the same rewards, ends that are named, and a node that is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from moerl_runs import ENVIRONMENT, Sums, rows, summary
from ray_cluster import NodesOfRay
from waiting import eventually, status_of

from moerl.buffer.ledger import LEDGER_FILE, Ledger

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

LONG = 900.0

NOTING = '''
import os
import time
from pathlib import Path

import sums_reward

HERE = Path(__file__).parent


def raylet():
    """The node of Ray that this process descends from; 0 where it is none."""
    pid = os.getpid()
    while pid > 1 and not Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0")[0].endswith(b"/raylet"):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid if pid > 1 else 0


def note():
    with (HERE / "nodes.txt").open("a") as file:
        file.write(f"{raylet()}\\n")


def score(row, response):
    note()
    return sums_reward.score(row, response)


def slow(row, response):
    time.sleep(0.2)
    return score(row, response)


def hang_once(row, response):
    note()
    if raylet() and not (HERE / "hung").exists():
        (HERE / "hung").touch()
        time.sleep(600)
    return sums_reward.score(row, response)
'''


@pytest.fixture
def sums(tmp_path: Path) -> Sums:
    (tmp_path / "noting.py").write_text(NOTING)
    return Sums.write(tmp_path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[NodesOfRay]:
    # The second node has no CPU for a rank.
    with NodesOfRay(1, 0) as started:
        yield started


def on(cluster: NodesOfRay) -> list[str]:
    return ["launch.on=ray", f"launch.address='{cluster.address}'"]


def output_of(run_dir: Path) -> str:
    return run_dir.with_suffix(".out").read_text()


@contextmanager
def training(
    sums: Sums, run_dir: Path, *keys: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    path = os.pathsep.join([str(sums.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with run_dir.with_suffix(".out").open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "moerl", *sums.train(run_dir), *keys],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def trained(sums: Sums, run_dir: Path, *keys: str, variables: Mapping[str, str] | None = None) -> None:
    with training(sums, run_dir, *keys, variables=variables) as run:
        assert status_of(run, LONG) == 0, output_of(run_dir)


def nodes_of(sums: Sums) -> set[str]:
    """Returns the nodes (pids of raylets) of the calls so far, without calls in the controller's own processes."""
    file = sums.folder / "nodes.txt"
    return set(file.read_text().split()) - {"0"} if file.exists() else set()


def test_functions_on_all_nodes_give_the_rewards_that_they_give_here(sums: Sums, cluster: NodesOfRay) -> None:
    local, remote = sums.folder / "local", sums.folder / "remote"
    keys = ("task.reward=noting:score", "task.reward_workers=4")
    trained(sums, local, *keys)
    assert nodes_of(sums) == set()
    trained(sums, remote, *keys, *on(cluster), variables=cluster.variables)
    assert len(nodes_of(sums)) == 2
    assert rows(remote) == rows(local)
    assert summary(remote) == summary(local)


def test_a_function_that_hangs_on_a_node_is_ended_and_named_with_it(sums: Sums, cluster: NodesOfRay) -> None:
    run_dir = sums.folder / "run"
    keys = ("task.reward=noting:hang_once", "task.reward_timeout_seconds=5", "quarantine.max_rate=0.5")
    trained(sums, run_dir, *keys, *on(cluster), variables=cluster.variables)
    said = "".join(file.read_text(errors="replace") for file in (run_dir / "quarantine").rglob("*.json*"))
    assert "time limit passed; its process was killed" in said
    assert "on node 127.0.0." in said


def test_a_run_goes_on_where_a_node_with_reward_processes_is_lost(sums: Sums) -> None:
    run_dir = sums.folder / "run"
    keys = ("task.reward=noting:slow", "task.reward_workers=4", "rl.steps=12")
    with NodesOfRay(1, 0) as cluster, training(sums, run_dir, *keys, *on(cluster), variables=cluster.variables) as run:
        eventually(lambda: run.poll() is not None or len(nodes_of(sums)) == 2, seconds=LONG)
        assert run.poll() is None, output_of(run_dir)
        cluster.remove_node()
        assert status_of(run, LONG) == 0, output_of(run_dir)
    ledger = Ledger.restored(json.loads((run_dir / LEDGER_FILE).read_text()))
    assert not ledger.quarantined
    assert not ledger.pending
    assert [row["step"] for row in rows(run_dir) if row["stage"] == "rl"] == list(range(1, 13))
