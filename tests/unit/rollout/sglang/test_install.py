from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.sglang import install as install_module
from moerl.rollout.sglang.install import device_of, find_python, install, site_packages
from moerl.rollout.sglang.patches import SGLANG_VERSION, STAMP, release_folder


def test_an_unknown_device_is_refused(tmp_path: Path):
    with pytest.raises(EngineError, match="device"):
        install(tmp_path, "tpu")


def test_an_interpreter_that_does_not_run_is_named():
    with pytest.raises(EngineError, match="/nowhere/python"):
        find_python("/nowhere/python")


def test_our_own_interpreter_serves():
    assert find_python(sys.executable) == sys.executable


@pytest.mark.parametrize("seen", [{"sglang": "0.5.23", "device": "cpu"}, {"sglang": SGLANG_VERSION, "device": "cuda"}])
def test_an_environment_made_for_something_else_is_left_alone(tmp_path: Path, seen: dict[str, str]):
    (tmp_path / "moerl-sglang.json").write_text(json.dumps(seen))
    with pytest.raises(EngineError, match="made for something else"):
        install(tmp_path, "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["moerl-sglang.json"]


def test_a_release_with_other_patches_is_installed_and_patched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site"
    (tmp_path / "moerl-sglang.json").write_text(json.dumps({"sglang": SGLANG_VERSION, "device": "cpu"}))
    for folder in (site / "sglang", site / f"sglang-{SGLANG_VERSION}.dist-info", tmp_path / "bin"):
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


def test_the_cpu_packages_name_the_patched_release():
    packages = (release_folder() / "cpu" / "packages.txt").read_text().splitlines()
    assert f"sglang=={SGLANG_VERSION}" in packages
