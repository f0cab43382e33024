"""A node that is lost under a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moerl_runs import DoneRun
from run_checks import assert_the_same, processes_of
from slurm_cluster import Cluster
from slurm_jobs import TRAIN, Submitted, check, submit
from waiting import eventually

from moerl.launch.slurm.script import JobSettings, render
from moerl.launch.slurm.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes"), 2) as cluster:
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


def test_a_script_for_two_nodes_brings_ray_together_passes_the_status_on_and_leaves_nothing(
    two_nodes: Cluster, tmp_path: Path
) -> None:
    """The part of the script that starts and stops Ray; the run beside it has its ranks on one node."""
    run = tmp_path / "run"
    settings = JobSettings("run", 2, "10", 60, 0, run, tmp_path)
    overrides = ["recipe=tiny", "rl.steps=1", "sft.steps=1", f"run_dir='{run}'"]
    settings.folder.mkdir(parents=True)
    settings.script.write_text(render(settings, Site(cpus_per_node=1), overrides))
    check(settings.script)
    job = Submitted(two_nodes, two_nodes.sbatch(str(settings.script)), run)
    job.wait_for("COMPLETED")
    assert "2 of 2 Ray nodes" in (run / "slurm" / f"job-{job.job_id}.log").read_text(), job.told()
    assert job.ends() == [(0, 0)]
    assert not list((run / "slurm").glob("*.token"))
    eventually(lambda: not two_nodes.step_processes())
