"""Scripts, rendered and by hand: shellcheck finds nothing, and SLURM would take them."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_jobs import ROOT, check, launch

from moerl.launch.slurm.script import JobSettings, render
from moerl.launch.slurm.site import Container, Site

pytestmark = pytest.mark.slurm
BY_HAND = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
SITES = {
    "plain": Site(),
    "all": Site(
        partition="high",
        cpus_per_node=2,
        memory="1G",
        python="/usr/bin/python3",
        modules=["cuda/13.0"],
        environment={"A": "it's", "B": "$HOME `id` *"},
        sbatch=["--comment=a run", "--nice=10"],
    ),
    "apptainer": Site(container=Container(runtime="apptainer", image="a b.sif", mounts=["/tmp"])),
    "pyxis": Site(container=Container(runtime="pyxis", image="a b.sqsh", mounts=["/tmp", "/home"])),
    "enroot": Site(container=Container(runtime="enroot", image="a.sqsh", mounts=["/tmp:/tmp"])),
}


def render_to(folder: Path, site: Site) -> Path:
    job = JobSettings("run", 1, "1:00:00", 300, 3, folder / "run", folder)
    script = folder / "job.sbatch"
    script.write_text(render(job, site, ["recipe=tiny", "task.prompt='a \"b\" $c'"]))
    return script


@pytest.mark.parametrize("name", SITES)
def test_shellcheck_finds_nothing_in_a_rendered_script_and_slurm_takes_it(
    slurm: Cluster, tmp_path: Path, name: str
) -> None:
    script = render_to(tmp_path, SITES[name])
    check(script)
    slurm.call("sbatch", "--test-only", str(script))


def test_gpus_that_no_node_has_are_what_slurm_refuses_a_script_for(slurm: Cluster, tmp_path: Path) -> None:
    script = render_to(tmp_path, Site(gpus_per_node=8))
    check(script)
    with pytest.raises(AssertionError, match=r"Invalid generic resource|configuration is not available"):
        slurm.call("sbatch", "--test-only", str(script))


@pytest.mark.parametrize("script", BY_HAND, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_a_script_by_hand_and_slurm_takes_it(slurm: Cluster, script: Path) -> None:
    check(script)
    array = ["--array=0-1"] if script.name == "sweep.sbatch" else []
    slurm.call("sbatch", "--test-only", "--time=10", *array, str(script), "a", "b")


def test_what_slurm_refuses_is_an_error_that_says_why(slurm: Cluster, tmp_path: Path) -> None:
    done = launch(slurm, tmp_path / "run", "recipe=tiny", site="partition: none\n")
    assert done.returncode == 2
    assert "SLURM refused the job; seen: sbatch: error:" in done.stderr
    assert "invalid partition" in done.stderr
    assert slurm.call("squeue", "--noheader") == ""
