from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.sglang import install as install_module
from moerl.rollout.sglang.install import device_of, find_python, install, pythons, site_packages
from moerl.rollout.sglang.patches import DEFAULT_RELEASE, STAMP, release_folder, releases


def test_an_unknown_device_is_refused(tmp_path: Path):
    with pytest.raises(EngineError, match="device"):
        install(tmp_path, "tpu")


def test_an_interpreter_that_does_not_run_is_named():
    with pytest.raises(EngineError, match="/nowhere/python"):
        find_python("/nowhere/python")


def test_our_own_interpreter_serves():
    assert find_python(sys.executable) == sys.executable


@pytest.mark.parametrize("seen", [{"sglang": "0.5.23", "device": "cpu"}, {"sglang": DEFAULT_RELEASE, "device": "cuda"}])
def test_an_environment_made_for_something_else_is_left_alone(tmp_path: Path, seen: dict[str, str]):
    (tmp_path / "moerl-sglang.json").write_text(json.dumps(seen))
    with pytest.raises(EngineError, match="made for something else"):
        install(tmp_path, "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["moerl-sglang.json"]


def test_a_release_with_other_patches_is_installed_and_patched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site"
    (tmp_path / "moerl-sglang.json").write_text(json.dumps({"sglang": DEFAULT_RELEASE, "device": "cpu"}))
    for folder in (site / "sglang", site / f"sglang-{DEFAULT_RELEASE}.dist-info", tmp_path / "bin"):
        folder.mkdir(parents=True)
    (tmp_path / "bin" / "python").touch()
    (site / STAMP).write_text('{"fingerprint": "of an earlier version"}')
    calls: list[str] = []

    def run(command: list[str], purpose: str) -> str:
        # By now nothing is left that a patch could have touched.
        assert not list(site.glob("sglang*"))
        calls.append(purpose)
        return ""

    monkeypatch.setattr(install_module, "site_packages", lambda environment: site)
    monkeypatch.setattr(install_module, "_run", run)
    monkeypatch.setattr(install_module, "apply_patches", lambda *arguments: calls.append("patch"))
    assert install(tmp_path, "cpu")
    assert [purpose.partition(" ")[0] for purpose in calls] == ["install", "install", "patch", "compile"]
    assert device_of(tmp_path) == "cpu"


def test_an_environment_that_was_not_finished_has_no_device(tmp_path: Path):
    with pytest.raises(EngineError, match="moerl sglang install"):
        device_of(tmp_path)


def test_a_missing_environment_says_how_to_make_it(tmp_path: Path):
    with pytest.raises(EngineError, match="moerl sglang install"):
        site_packages(tmp_path / "none")


@pytest.mark.parametrize("release", releases())
def test_the_cpu_packages_name_the_patched_release(release: str):
    packages = (release_folder(release) / "cpu" / "packages.txt").read_text().splitlines()
    assert f"sglang=={release}" in packages


@pytest.mark.parametrize("release", releases())
def test_every_release_names_interpreters_that_it_runs_on(release: str):
    assert "python3.12" in pythons(release)


def test_an_interpreter_that_the_release_does_not_run_on_is_refused(tmp_path: Path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho '[3, 10]'\n")
    old.chmod(0o755)
    assert find_python(str(old), "0.5.21") == str(old)
    with pytest.raises(EngineError, match=r"expected: python3\.12 or python3\.11"):
        find_python(str(old), "0.5.23")


def test_the_release_that_is_asked_for_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[str] = []

    def run(command: list[str], purpose: str) -> str:
        commands.append(" ".join(command))
        return ""

    monkeypatch.setattr(install_module, "site_packages", lambda environment: tmp_path / "site")
    monkeypatch.setattr(install_module, "_run", run)
    monkeypatch.setattr(install_module, "apply_patches", lambda site, patches: commands.append(patches.version))
    assert install(tmp_path, "cuda", version="0.5.23")
    assert "0.5.23" in commands
    assert any("sglang==0.5.23" in command for command in commands)
    assert json.loads((tmp_path / "moerl-sglang.json").read_text()) == {"sglang": "0.5.23", "device": "cuda"}
    with pytest.raises(EngineError, match=r"--version 0\.5\.23 --device cuda"):
        install(tmp_path, "cuda")
