"""Environment of a job in a container, through stand-ins that drop the same parts of it as the real programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from container_stand_ins import StandIns, stand_ins

from moerl.errors import ConfigError
from moerl.launch.slurm.containers import container_start, shown_folders
from moerl.launch.slurm.script import JobSettings, render, render_report
from moerl.launch.slurm.site import Container, Site

RUNTIMES = ("enroot", "apptainer", "pyxis")
EXPORTED = {
    "HF_TOKEN": "secret-of-the-hub",
    "HF_HOME": "/shared/hf",
    "HF_HUB_OFFLINE": "1",
    "WANDB_API_KEY": "secret of the tracker",
    "NCCL_SOCKET_IFNAME": "ib0",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "NVIDIA_VISIBLE_DEVICES": "0,1",
    "MASTER_ADDR": "10.0.0.1",
    "MOERL_SGLANG_ENV": "/opt/moerl/.venv-sglang",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "4",
    "HTTPS_PROXY": "http://proxy:3128",
    "no_proxy": "localhost, 10.0.0.0/8",
    "SLURM_RESTART_COUNT": "2",
}
"""Exported before the job was submitted, or by SLURM."""
OF_THE_NODE = {"LD_LIBRARY_PATH": "/host/lib", "CUDA_HOME": "/host/cuda", "HOME": "/host/home"}
OF_THE_IMAGE = {
    **{"LD_LIBRARY_PATH": "/image/lib", "CUDA_HOME": "/image/cuda", "HF_HOME": "/image", "HOME": "/image/home"},
    **{"NVIDIA_VISIBLE_DEVICES": "all", "OMP_NUM_THREADS": "1"},
}


@pytest.fixture
def programs(tmp_path: Path) -> StandIns:
    return stand_ins(tmp_path / "stand_ins", OF_THE_IMAGE)


def write_script(programs: StandIns, runtime: str, nodes: int = 1, arguments: tuple[str, ...] = ()) -> Path:
    folder = programs.folder.parent
    container = Container(runtime=runtime, image=str(programs.image), arguments=[*arguments])  # type: ignore[arg-type]
    site = Site(container=container, environment={"OF_THE_SITE": "it's $HOME"})
    job = JobSettings("run", nodes, "1:00:00", 300, 3, folder / "run", folder)
    (job.folder).mkdir(parents=True)
    job.script.write_text(render(job, site, ["recipe=tiny"]))
    return job.script


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("runtime", [*RUNTIMES, "apptainer --cleanenv"])
def test_the_environment_of_a_job_reaches_every_command_in_the_container(
    programs: StandIns, runtime: str, nodes: int
) -> None:
    # Sites with sbatch --export=NONE leave this one behind, and steps would get nothing.
    variables = {**EXPORTED, **OF_THE_NODE, "SLURM_EXPORT_ENV": "NONE"}
    kind, *arguments = runtime.split()
    status, output = programs.run(write_script(programs, kind, nodes, (*arguments,)), variables)
    assert status == 0, output
    commands = {f"moerl.launch.slurm.attempts-{event}-0" for event in ("begin", "end")}
    commands |= {"moerl-doctor-0", "moerl-train-0"}
    if nodes > 1:
        commands |= {"moerl-doctor-1", "ray.scripts.scripts-0", "moerl.ranks.on_ray.nodes-0"}
    started = programs.commands()
    assert started == commands
    for command in started:
        seen = programs.seen(command)
        assert {name: seen.get(name) for name in EXPORTED} == EXPORTED, command
        assert seen["OF_THE_SITE"] == "it's $HOME"
        assert {name: seen[name] for name in OF_THE_NODE} == {name: OF_THE_IMAGE[name] for name in OF_THE_NODE}
        assert seen["PWD_INSIDE"] == str(programs.folder.parent)
    assert "secret" not in programs.calls()
    if nodes > 1:
        assert programs.seen("moerl-train-0")["RAY_AUTH_MODE"] == "token", "exported by the script, after its start"
        assert programs.seen("moerl-doctor-1")["SLURM_PROCID"] == "1", "that of the task, not of the batch shell"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_signal_to_the_shell_of_a_job_reaches_the_run_in_the_container(programs: StandIns, runtime: str) -> None:
    assert programs.stop(write_script(programs, runtime), EXPORTED) == 75
    assert "scontrol requeue 7" in programs.calls()


def test_what_an_image_prints_as_it_starts_is_no_log_of_an_attempt(programs: StandIns) -> None:
    _, output = programs.run(write_script(programs, "enroot"), EXPORTED)
    assert "== an image that greets ==" in (programs.folder / "seen" / "attempt-001.log").read_text(), output
    assert f"log: {programs.folder}/seen/attempt-001.log\n" in output


def test_a_variable_of_several_lines_is_refused_where_enroot_would_cut_it(programs: StandIns) -> None:
    status, output = programs.run(write_script(programs, "enroot"), {"WANDB_NOTES": "two\nlines"})
    assert status == 1
    assert "error: WANDB_NOTES has several lines, and enroot passes one" in output
    assert programs.commands() == set()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("enroot", "start"), {"HF_HOME": "/image", "HF_TOKEN": None}),
        (("apptainer", "exec"), {"HF_HOME": "/image", "HF_TOKEN": "a"}),
        (("apptainer", "exec", "--cleanenv"), {"HF_HOME": "/image", "HF_TOKEN": None}),
        (("srun", "--container-image=IMAGE"), {"HF_HOME": "/image", "HF_TOKEN": "a"}),
    ],
)
def test_the_stand_ins_drop_what_they_are_not_told_to_keep(
    programs: StandIns, words: tuple[str, ...], kept: dict[str, str | None]
) -> None:
    given = [word.replace("IMAGE", str(programs.image)) for word in words]
    image = [] if "srun" in words else [programs.image]
    environment = programs.environment({"HF_HOME": "/b", "HF_TOKEN": "a"})
    done = subprocess.run([*given, *image, "env"], env=environment, capture_output=True, text=True, check=True)
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line and " " not in line)
    assert {name: seen.get(name) for name in kept} == kept


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_run_directory_and_where_a_job_is_submitted_are_mounted_if_no_mount_shows_them(runtime: str) -> None:
    container = Container(runtime=runtime, image="a", mounts=["/data:/data:ro", "/lustre/me:/home/me"])  # type: ignore[arg-type]
    folders = [Path("/home/me/work"), Path("/runs/one")]
    words = " ".join(container_start(container, [], folders).inside)
    mounts = {
        "enroot": "--mount /data:/data:ro --mount /lustre/me:/home/me --mount /runs/one a env --chdir=/home/me/work",
        "apptainer": "--bind /data:/data:ro --bind /lustre/me:/home/me --bind /runs/one a env --chdir=/home/me/work",
        "pyxis": "--container-mounts=/data:/data:ro,/lustre/me:/home/me,/runs/one --container-workdir=/home/me/work",
    }
    assert mounts[runtime] in words
    shown = shown_folders(container, folders)
    assert {Path("/data"), Path("/home/me"), Path("/runs/one")} <= {*shown}


def test_processes_of_ray_on_a_node_share_its_tmp(programs: StandIns) -> None:
    assert "--mount /tmp " in write_script(programs, "enroot", nodes=2).read_text() + " ", "one of each container's own"


@pytest.mark.parametrize("folder", ["/", "/a:b", "/a,b"])
def test_a_folder_that_a_container_cannot_mount_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="container: a folder that it cannot mount"):
        container_start(Container(runtime="enroot", image="a"), [], [Path(folder)])


def test_the_report_of_a_sweep_runs_in_the_container_too(programs: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(programs.folder.parent)
    script = programs.folder / "report.sbatch"
    script.write_text(
        render_report(Path("/sweep"), Site(container=Container(runtime="pyxis", image=str(programs.image))))
    )
    status, output = programs.run(script, EXPORTED)
    assert status == 0, output
    assert programs.seen("moerl.launch.slurm.sweeps-0")["HF_TOKEN"] == EXPORTED["HF_TOKEN"]
