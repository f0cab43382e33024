"""A node that is lost under a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moerl_runs import DoneRun
from run_checks import assert_the_same, processes_of
from slurm_cluster import Cluster
from slurm_jobs import TRAIN, check, submit

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


def test_shellcheck_finds_nothing_in_a_script_for_two_nodes_and_slurm_takes_it(
    two_nodes: Cluster, tmp_path: Path
) -> None:
    """Not run: no configuration of a run takes two nodes yet."""
    script = tmp_path / "job.sbatch"
    script.write_text(render(JobSettings("run", 2, "10", 60, 0, tmp_path / "run", tmp_path), Site(), ["recipe=tiny"]))
    assert "--head" in script.read_text()
    check(script)
    two_nodes.call("sbatch", "--test-only", str(script))
