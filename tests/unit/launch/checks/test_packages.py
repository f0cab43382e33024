"""Packages that are not what moerl asks for, or not what the lock file says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml
from asked_commands import Ask, Broken

from moerl import cli
from moerl.launch.checks import packages
from moerl.launch.checks.packages import (
    check_chain,
    check_lock,
    check_pins,
    check_python,
    exact_names,
    installed_versions,
    own_requirements,
    package_checks,
    read_lock,
    read_pins,
)
from moerl.machine.shipped import BRIDGE

ROOT = Path(__file__).parents[4]
LOCK = ROOT / "requirements" / "run.lock"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return Path(tmp_path / "run.lock")


def changed_lock(lock: Path, package: str, version: str) -> Path:
    """The lock file of this repository with another version of one package."""
    text, count = re.subn(rf"(?m)^{package}==\S+", f"{package}=={version}", LOCK.read_text())
    assert count == 1
    lock.write_text(text)
    return lock


def test_this_environment_is_what_pyproject_and_the_lock_file_say() -> None:
    found = package_checks()
    assert [check.level for check in found if check.level == "red"] == []
    assert {check.name for check in found} == {"Python", "pins", "what these need", "lock file"}


def test_the_requirements_of_a_checkout_are_those_of_its_pyproject() -> None:
    assert own_requirements() == read_pins(ROOT / "pyproject.toml")
    assert "torch>=2.11,<2.14" in own_requirements()


def test_another_megatron_in_the_lock_file_is_named(lock: Path) -> None:
    changed = changed_lock(lock, "megatron-core", "0.19.1")
    found = check_lock(changed, installed_versions(), exact_names(own_requirements()))
    assert found.level == "red"
    assert found.seen.startswith("megatron-core 0.19.2")
    assert found.expected == "megatron-core 0.19.1, as run.lock says"
    assert "make setup" in found.remedy


@pytest.mark.parametrize(("name", "version"), [("rich", "15.0.99"), ("torch", "2.12.1")])
def test_another_version_of_what_is_not_pinned_is_a_note(name: str, version: str, lock: Path) -> None:
    found = check_lock(changed_lock(lock, name, version), installed_versions(), exact_names(own_requirements()))
    assert found.level == "yellow"
    assert found.expected == f"{name} {version}, as run.lock says"


@pytest.mark.parametrize(("version", "level"), [("2.10.0", "red"), ("2.11.0+cu130", "green"), ("2.14.0", "red")])
def test_a_torch_that_is_not_supported_is_named(version: str, level: str) -> None:
    found = check_pins(own_requirements(), installed_versions() | {"torch": version})
    assert found.level == level
    assert (found.expected == "torch<2.14,>=2.11") == (level == "red")


def test_a_wheel_without_a_lock_file_says_so(tmp_path: Path) -> None:
    found = check_lock(tmp_path / "requirements" / "run.lock", installed_versions(), set())
    assert (found.level, "a wheel carries none" in found.seen) == ("green", True)


def test_a_local_part_of_a_version_is_no_difference(lock: Path) -> None:
    lock.write_text("torch==2.13.0 \\\n    --hash=sha256:00\n")
    assert check_lock(lock, {"torch": "2.13.0+cpu"}, {"torch"}).level == "green"


def test_entries_for_other_systems_are_left_out(lock: Path) -> None:
    lock.write_text("colorama==0.4.6 ; sys_platform == 'win32' \\\n    --hash=sha256:00\nTor_ch==1.0 \\\n")
    assert read_lock(lock) == {"tor-ch": "1.0"}


def test_a_package_that_is_missing_or_too_old_is_named() -> None:
    installed = installed_versions() | {"megatron-core": "0.16.1"}
    del installed["pyarrow"]
    found = check_pins(own_requirements(), installed)
    assert found.level == "red"
    assert found.seen == "pyarrow missing, megatron-core 0.16.1"
    assert found.expected == "pyarrow>=26, megatron-core==0.19.2"


def test_megatron_bridge_is_asked_for_though_no_list_names_it() -> None:
    installed = installed_versions()
    del installed["megatron-bridge"]
    assert check_pins(own_requirements(), installed).seen == "megatron-bridge missing"


def test_what_a_package_needs_in_turn_is_named() -> None:
    installed = installed_versions()
    del installed["sympy"]
    found = check_chain(own_requirements(), installed)
    assert found.level == "red"
    assert "sympy missing" in found.seen
    assert "torch asks for sympy" in found.expected


def test_what_an_extra_needs_is_named() -> None:
    installed = installed_versions() | {"antlr4-python3-runtime": "4.13.2"}
    found = check_chain(["math-verify[antlr4_9_3]>=0.9,<1"], installed)
    assert found.level == "red"
    assert "antlr4-python3-runtime 4.13.2" in found.seen


@pytest.mark.parametrize(("version", "level"), [((3, 12), "green"), ((3, 11), "red"), ((3, 13), "red")])
def test_python_3_12_alone_will_do(version: tuple[int, int], level: str) -> None:
    assert check_python(version).level == level


def test_the_remedy_for_a_missing_megatron_bridge_installs_the_release_of_the_lock() -> None:
    assert BRIDGE in (ROOT / "requirements" / "bridge.in").read_text().splitlines()
    assert f"pip install --no-deps {BRIDGE}`" in check_pins([], {}).remedy


CONTAINER: dict[str, object] = {"container": {"runtime": "enroot", "image": "moerl.sqsh"}}
ELSEWHERE: tuple[tuple[dict[str, object], str], ...] = (
    (CONTAINER, "in the container moerl.sqsh"),
    ({"python": "/opt/moerl/bin/python"}, "in /opt/moerl/bin/python on the node"),
)
"""By site file, the place of the packages of a job."""
ON_RAY = ("recipe=tiny", "launch.on=ray", "metrics.sinks=[jsonl,trackio]")
TWO_NODES = ("--nodes", "2")


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Has no command find these packages."""
    found, here = importlib.util.find_spec, installed_versions()
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in names else found(name, *more))
    monkeypatch.setattr(packages, "installed_versions", lambda: {name: here[name] for name in here.keys() - {*names}})


def test_ray_and_trackers_of_another_interpreter_are_a_note(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "ray", "trackio")
    for site, where in ELSEWHERE:
        status, text = ask("dry run", Broken(ON_RAY, "", site=site, words=TWO_NODES))
        assert status == 0, text
        said = f"note: packages: not looked at from here: what `moerl train` needs, trackio, Ray, {where}; expected: "
        assert said in text
        assert "`moerl doctor` looks on the node" in text


def test_ray_is_asked_for_where_the_run_has_the_interpreter_of_the_command(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "ray")
    for door in ("train", "doctor", "dry run"):
        status, text = ask(door, Broken(ON_RAY[:2], "", words=TWO_NODES))
        assert status in (1, 2), text
        assert "launch.on=ray: Ray is not installed" in text
    # A container that no site file names is none.
    assert ask("doctor", Broken(ON_RAY[:2], "", site=CONTAINER))[0] == 1


def test_a_job_with_an_interpreter_that_lacks_what_a_run_needs_is_not_submitted(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "torch", "megatron-bridge")
    status, text = ask("dry run", Broken(("recipe=tiny",), ""))
    assert status == 2, text
    assert "error: python: the job would run in an interpreter that lacks what `moerl train` needs" in text
    assert f"seen: torch missing, megatron-bridge missing, for {sys.executable}" in text
    assert "with its extra `train`" in text
    assert "`python` or `container` of the site file" in text
    for site, _ in ELSEWHERE:
        assert ask("dry run", Broken(("recipe=tiny",), "", site=site))[0] == 0


@pytest.mark.usefixtures("ask")
def test_jobs_of_a_sweep_are_looked_at_as_one_job_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "trackio")
    keys = ["recipe=tiny", "seed=1,2", "metrics.sinks=[jsonl,trackio]", "sweep.dir=sweep"]
    for site, status in (({}, 2), (CONTAINER, 0)):
        (place / "site.yaml").write_text(yaml.safe_dump(site))
        words = ["launch", "slurm", "-m", "--time", "1:00:00", "--site", "site.yaml", "--dry-run"]
        assert cli.main([*words, *keys]) == status
        assert ("metrics.sinks: trackio is not installed" in capsys.readouterr().err) == (status == 2)
