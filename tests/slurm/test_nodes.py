"""Two nodes: a run over both by Ray, and a run whose node is lost."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_live
from example_commands import keys_of
from moerl_runs import DoneRun, moerl
from ray_cluster import needs_ray
from run_checks import assert_the_same, processes_of, rank_processes
from slurm_cluster import Cluster
from slurm_jobs import TRAIN, check, submit

from moerl.launch.slurm.script import JobSettings, render
from moerl.launch.slurm.site import Site
from moerl.machine.interfaces import own_address
from moerl.rollout.fleet.endpoint import read_endpoint
from moerl.rollout.sglang.server import ENDPOINT_FILE
from moerl.telemetry.sinks import read_rows

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


ADDRESS = own_address("192.0.2.1", 9)
"""Address of this machine in its network: Ray has no cluster of several nodes on the loopback address."""


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes"), 2, ADDRESS) as cluster:
        yield cluster


def test_a_run_whose_node_is_lost_goes_on_on_another_one(
    two_nodes: Cluster, undisturbed: DoneRun, tmp_path: Path
) -> None:
    job = submit(two_nodes, tmp_path / "run", *TRAIN)
    job.wait_for_step(1)
    node = job.job()["NodeList"]
    two_nodes.kill_node(node)
    assert processes_of(job.run_dir) == []
    ended = job.wait_for("COMPLETED")
    assert ended["NodeList"] != node
    assert ended["Restarts"] == "1"
    assert [row["event"] for row in job.attempts()] == ["begin", "begin", "end"]
    assert_the_same(job.run_dir, undisturbed.folder)


IMPORTS = [Path(each) for each in sys.path]
OVER_BOTH = keys_of("slurm_two_nodes")
assert OVER_BOTH[-1] == "launch.on=ray"


def raylets(job_id: str) -> list[str]:
    """The nodes of SLURM on which a job has a node of Ray; tests beside this one may have others."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_raylet = (process / "cmdline").read_bytes().split(b"\0")[0].endswith(b"/raylet")
            if is_raylet and f"SLURM_JOB_ID={job_id}" in (process / "environ").read_text().split("\0"):
                found.append(node_of(int(process.name)))
    return sorted(found)


def node_of(pid: int) -> str:
    """The node of SLURM that a process belongs to, by its environment."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    [name] = [each.removeprefix("SLURMD_NODENAME=") for each in variables if each.startswith("SLURMD_NODENAME=")]
    return name


@needs_ray
def test_a_run_over_two_nodes_is_stopped_requeued_and_ends_with_the_metrics_of_local_processes(
    two_nodes: Cluster, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    finished = moerl(
        "train", *OVER_BOTH[:-1], f"run_dir='{local}'", command=(sys.executable, "-m", "moerl"), path=IMPORTS
    )
    assert finished.status == 0, finished.output
    job = submit(two_nodes, tmp_path / "run", *OVER_BOTH, "--nodes", "2")
    job.wait_for_step(1)
    assert raylets(job.job_id) == ["n1", "n2"]
    assert job.job()["NumNodes"] == "2"
    assert [node_of(pid) for _, pid in sorted(rank_processes(job.run_dir).items())] == ["n1", "n2"]
    two_nodes.call("scancel", "--batch", "--signal=USR1", job.job_id)
    job.wait_for_end(1)
    job.wait_for("COMPLETED")
    assert job.ends() == [(75, 75), (0, 0)]
    assert raylets(job.job_id) == []
    assert_the_same(job.run_dir, local)
    looks = sorted(job.run_dir.glob("slurm/*.doctor"))
    assert len(looks) == 2
    assert all("nodes that see it: 2 of 2" in look.read_text() for look in looks)


COLOCATED = (
    *("recipe=tiny", "num_threads=2", "rl.steps=2", "parallel.data=2", "launch.on=ray", "rollout=sglang"),
    *("rollout.placement=colocated", "rollout.memory_share=0.4", "rollout.servers=2"),
    f"rollout.environment={sglang_live.ENVIRONMENT}",
)
LONG = 1500.0
"""For a job with two servers, on a busy machine."""


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(2 * LONG)
@pytest.mark.skipif(not sglang_live.ENVIRONMENT.exists(), reason="no environment of SGLang servers: make sglang")
def test_each_node_of_a_colocated_run_has_the_server_of_its_rank(two_nodes: Cluster, tmp_path: Path) -> None:
    job = submit(two_nodes, tmp_path / "run", *COLOCATED, "--nodes", "2", "--time", "50")
    metrics = job.run_dir / "metrics.jsonl"
    two_nodes.wait_until(lambda: metrics.exists() and '"rl", "step": 1' in metrics.read_text(), job.job_id, LONG)
    assert [node_of(pid) for _, pid in sorted(rank_processes(job.run_dir).items())] == ["n1", "n2"]
    servers = [read_endpoint(job.run_dir / "sglang" / name / ENDPOINT_FILE) for name in ("0", "1")]
    assert [node_of(server.pid) for server in servers] == ["n1", "n2"]
    two_nodes.wait_for(job.job_id, "COMPLETED", seconds=LONG)
    assert job.ends() == [(0, 0)]
    steps = [row for row in read_rows(metrics) if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["seconds/sleep"] > 0.0 and row["mismatch/logprob_abs_max"] <= 1e-5 for row in steps)


def test_shellcheck_finds_nothing_in_a_script_for_two_nodes_and_slurm_takes_it(
    two_nodes: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(render(JobSettings("run", 2, "10", 60, 0, tmp_path / "run", tmp_path), Site(), ["recipe=tiny"]))
    assert "--head" in script.read_text()
    check(script)
    two_nodes.call("sbatch", "--test-only", str(script))
