"""Packages of the extra `gpu` are never needed to import moerl: machines without GPUs have none of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = {"transformer_engine", "flash_attn"}
EVERY_MODULE = '''
import importlib, importlib.util, pkgutil, sys

class Hiding:
    """A finder that does not find what is named."""
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in sys.argv[1:] else self._finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import moerl
failed = []
names = [each.name for each in pkgutil.walk_packages(moerl.__path__, "moerl.", onerror=failed.append)]
has_ray = importlib.util.find_spec("ray") is not None
for name in names:
    if name != "moerl.__main__" and (has_ray or not name.startswith("moerl.ranks.on_ray.")):
        importlib.import_module(name)
print(len(names), failed)
'''


@pytest.mark.slow
def test_every_module_is_imported_where_packages_for_gpus_are_out_of_reach() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EVERY_MODULE, *PACKAGES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, failed = done.stdout.splitlines()[-1].split(" ", 1)
    assert int(count) > 200
    assert failed == "[]"


def test_no_module_names_packages_for_gpus_in_an_import() -> None:
    found: list[str] = []
    for path in (ROOT / "moerl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}:{name}" for name in names if name.partition(".")[0] in PACKAGES]
    assert found == []


def test_the_extra_is_of_the_cuda_that_the_locked_torch_is_built_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    engine, attention = map(Requirement, project["optional-dependencies"]["gpu"])
    lock = (ROOT / "requirements" / "run.lock").read_text(encoding="utf-8")
    assert "\ncuda-toolkit==13." in lock
    assert (engine.name, engine.extras) == ("transformer-engine", {"core_cu13", "pytorch"})
    assert attention.name == "flash-attn"
    assert "transformer-engine" not in lock
    assert "flash-attn" not in lock


def test_tests_on_cpus_load_the_transformer_engine_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    engine = Requirement(project["optional-dependencies"]["gpu"][0])
    lock = (ROOT / "requirements" / "transformer_engine.lock").read_text(encoding="utf-8")
    [version] = re.findall(r"^transformer-engine==(\S+)", lock, re.MULTILINE)
    assert engine.specifier.contains(version)
