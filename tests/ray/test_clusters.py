"""Ranks as actors of a Ray cluster: the same digits, and what becomes of a run where a part of it is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from listening import listening, open_to_others
from moerl_runs import ENVIRONMENT, rows, summary
from process_tree import family, tell_all
from ray_cluster import NodesOfRay
from run_checks import rank_processes
from waiting import eventually, is_alive, status_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

LONG = 900.0
KEYS = ("recipe=tiny", "parallel.data=2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[NodesOfRay]:
    with NodesOfRay(1, 1) as started:
        yield started


def train(run_dir: Path, *keys: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    with (run_dir.parent / f"{run_dir.name}.out").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "moerl", "train", *KEYS, f"run_dir='{run_dir}'", *keys],
            env={**os.environ, **ENVIRONMENT, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def output_of(run_dir: Path) -> str:
    return (run_dir.parent / f"{run_dir.name}.out").read_text()


def on(cluster: NodesOfRay) -> list[str]:
    return ["launch.on=ray", f"launch.address='{cluster.address}'"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until_it_learns(run: subprocess.Popen[str], run_dir: Path) -> dict[int, int]:
    """The processes of the ranks once the second stage has begun."""
    eventually(lambda: run.poll() is not None or "reinforcement learning:" in output_of(run_dir), seconds=LONG)
    assert run.poll() is None, output_of(run_dir)
    ranks = rank_processes(run_dir)
    assert sorted(ranks) == [0, 1]
    return ranks


def check_ended(run: subprocess.Popen[str], ranks: Mapping[int, int]) -> None:
    status_of(run, LONG)
    eventually(lambda: not any(is_alive(pid) for pid in ranks.values()), seconds=60.0)


SHORT = (
    "sft.steps=30",
    "rl.steps=3",
    "evaluation.every=0",
    "evaluation.dev_problems=8",
    "evaluation.heldout_problems=8",
)


@pytest.mark.parametrize("keys", [(), ("recipe=laptop", *SHORT)], ids=["tiny", "laptop"])
def test_actors_on_two_nodes_learn_the_digits_of_local_processes(
    cluster: NodesOfRay, tmp_path: Path, keys: tuple[str, ...]
):
    local, remote = tmp_path / "local", tmp_path / "remote"
    assert status_of(train(local, *keys), LONG) == 0, output_of(local)
    assert status_of(train(remote, *keys, *on(cluster), variables=cluster.variables), LONG) == 0, output_of(remote)
    assert rows(remote) == rows(local)
    assert summary(remote) == summary(local)


def test_an_actor_that_is_killed_is_named_and_the_other_is_ended(cluster: NodesOfRay, tmp_path: Path):
    run = train(tmp_path / "run", *on(cluster), "rl.steps=200", variables=cluster.variables)
    ranks = until_it_learns(run, tmp_path / "run")
    os.kill(parent_of(ranks[1]), signal.SIGKILL)
    check_ended(run, ranks)
    said = output_of(tmp_path / "run")
    assert "rank 1 of the trainer was lost" in said
    assert "its actor ended" in said


def test_a_rank_that_is_killed_is_named_with_signal_and_node(cluster: NodesOfRay, tmp_path: Path):
    run = train(tmp_path / "run", *on(cluster), "rl.steps=200", variables=cluster.variables)
    ranks = until_it_learns(run, tmp_path / "run")
    os.kill(ranks[0], signal.SIGKILL)
    check_ended(run, ranks)
    assert re.search(
        r"rank 0 of the trainer was lost in '\w+'; seen: killed by SIGKILL, on node", output_of(tmp_path / "run")
    )


def test_ranks_end_with_a_controller_that_is_killed(cluster: NodesOfRay, tmp_path: Path):
    run = train(tmp_path / "run", *on(cluster), "rl.steps=200", variables=cluster.variables)
    ranks = until_it_learns(run, tmp_path / "run")
    run.kill()
    check_ended(run, ranks)


def test_a_cluster_of_the_run_ends_with_a_controller_that_is_killed(tmp_path: Path):
    run = train(tmp_path / "run", "launch.on=ray", "rl.steps=200", variables={"TMPDIR": str(tmp_path)})
    ranks = until_it_learns(run, tmp_path / "run")
    assert len(listening(run.pid)) > 4
    assert open_to_others(run.pid) == []
    nodes = {parent_of(parent_of(pid)) for pid in ranks.values()}
    run.kill()
    check_ended(run, dict(enumerate([*ranks.values(), *nodes])))


def test_a_client_without_the_token_is_refused(cluster: NodesOfRay, tmp_path: Path):
    wrong = {**cluster.variables, "RAY_AUTH_TOKEN": "0" * 64}
    run = train(tmp_path / "run", *on(cluster), variables=wrong)
    assert status_of(run, LONG) != 0
    assert "no way into the Ray cluster" in output_of(tmp_path / "run")
    assert "token" in output_of(tmp_path / "run")


def test_an_address_where_nobody_listens_is_refused(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        keys = ("launch.on=ray", f"launch.address='{address}'")
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        assert status_of(train(tmp_path / "run", *keys, variables=variables), LONG) == 2
    assert f"launch.address: no way into the Ray cluster at {address}" in output_of(tmp_path / "run")


def test_a_node_that_leaves_is_named(tmp_path: Path):
    with NodesOfRay(1, 1) as cluster:
        run = train(tmp_path / "run", *on(cluster), "rl.steps=200", variables=cluster.variables)
        ranks = until_it_learns(run, tmp_path / "run")
        cluster.remove_node()
        check_ended(run, ranks)
    assert re.search(
        r"rank [01] of the trainer was lost in '\w+'; seen: node .* has left the cluster", output_of(tmp_path / "run")
    )


def test_stop_signals_to_all_processes_of_a_run_and_of_its_own_cluster_are_the_controllers(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with train(run_dir, "launch.on=ray", "rl.steps=50") as run:
        until_it_learns(run, run_dir)
        pids = family(run.pid)
        tell_all(pids, [signal.SIGTERM])
        assert status_of(run, LONG) == 75, output_of(run_dir)
    assert "go on from the last checkpoint" in output_of(run_dir)
    # Two ranks and their actors, Ray's own processes.
    assert len(pids) >= 8
    eventually(lambda: not any(map(is_alive, pids)))
