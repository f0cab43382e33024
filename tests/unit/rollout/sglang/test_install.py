from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.sglang.install import find_python, install, site_packages
from moerl.rollout.sglang.patches import SGLANG_VERSION, release_folder


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


def test_a_missing_environment_says_how_to_make_it(tmp_path: Path):
    with pytest.raises(EngineError, match="moerl sglang install"):
        site_packages(tmp_path / "none")


def test_the_cpu_packages_name_the_patched_release():
    packages = (release_folder() / "cpu" / "packages.txt").read_text().splitlines()
    assert f"sglang=={SGLANG_VERSION}" in packages
