"""The Containerfile names what is there: folders, files, make targets and variables, and what set-up needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from named_things import ROOT, make_targets

from moerl.launch.slurm.script import JobSettings, render, render_report
from moerl.launch.slurm.site import Container, Site

TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
LINES = re.sub(r"\\\n", " ", "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))).splitlines()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def arguments(instruction: str) -> list[str]:
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(f"{instruction} ")]


def copied() -> set[str]:
    return {name for line in arguments("COPY") for name in line.split()[:-1]}


def test_what_is_copied_is_in_the_repository() -> None:
    assert copied()
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_what_is_copied_is_all_that_a_wheel_and_set_up_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        *wheel["packages"],
        *(name.split("/")[0] for name in wheel["force-include"]),
        *project["project"]["license-files"],
        "README.md",
    }
    prerequisites = re.findall(r"^\.venv/\.ready: (.+)$", MAKEFILE, re.MULTILINE)[0].split()
    needed |= {name.split("/")[0] for name in prerequisites}
    assert needed | {"Makefile", "pyproject.toml"} <= copied()


@pytest.mark.parametrize("ignored", [".containerignore", "Containerfile.dockerignore"])
def test_what_is_ignored_is_nothing_that_is_copied(ignored: str) -> None:
    lines = (ROOT / ignored).read_text(encoding="utf-8").splitlines()[1:]
    assert ".venv" in lines
    assert not copied() & set(lines)


def test_targets_and_variables_of_make_exist() -> None:
    calls = [line.split()[1:] for line in arguments("RUN") if line.startswith("make ")]
    assert [call[0] for call in calls] == ["setup", "gpu", "sglang"]
    assert {call[0] for call in calls} <= make_targets()
    variables = {word.partition("=")[0] for call in calls for word in call[1:]}
    assert variables == {name for name in variables if re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE)}


@pytest.mark.parametrize("runtime", ["enroot", "apptainer", "pyxis"])
def test_what_a_job_calls_in_the_container_is_in_the_image(runtime: str) -> None:
    container = Container(runtime=runtime, image="moerl.sqsh")  # type: ignore[arg-type]
    job = JobSettings("run", 2, "1:00:00", 300, 3, Path("/runs/one"), Path("/runs"))
    text = render(job, Site(container=container), []) + render_report(Path("/runs"), Site(container=container))
    modules = set(re.findall(r"(?<=python -m )[\w.]+", text))
    assert {"moerl", "ray.scripts.scripts", "moerl.ranks.on_ray.nodes", "moerl.launch.slurm.sweeps"} <= modules
    for name in modules:
        if name.startswith("ray."):
            assert re.search(r'pip install .*--editable "\.\[ray\]"', TEXT)
        else:
            file = name.replace(".", "/")
            assert "moerl" in copied()
            assert (ROOT / f"{file}.py").is_file() or (ROOT / file / "__main__.py").is_file(), name
    # `python` is that of the set-up, and the first on the PATH; nothing runs before a command.
    [path] = [line for line in arguments("ENV") if line.startswith("PATH=")]
    assert path.startswith(f"PATH={arguments('WORKDIR')[0]}/.venv/bin:")
    assert arguments("ENTRYPOINT") == ["[]"]
    assert set(re.findall(r'(?m)^ *"\$\{inside\[@\]\}" (?!-)(\w+)', text)) <= {"python"}


def test_the_image_is_of_the_cuda_that_the_locked_torch_is_built_for() -> None:
    lock = (ROOT / "requirements" / "run.lock").read_text(encoding="utf-8")
    locked = re.findall(r"^cuda-toolkit==(\d+\.\d+)\.", lock, re.MULTILINE)[0]
    assert arguments("ARG")[0].startswith(f"IMAGE=nvidia/cuda:{locked}.")
    assert "cudnn-devel" in arguments("ARG")[0]
