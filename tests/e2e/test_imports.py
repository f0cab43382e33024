"""Imports of the processes of a run, and settings made before those, seen by a hook in each process."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import run_within

ROOT = Path(__file__).parents[2]
IN_PROCESS = ("rollout.placement=process", "buffer.max_staleness=1")
FEW = ("sft.steps=1", "rl.steps=2", "checkpoint.every=0")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("imports")]

HOOK = """
import atexit, json, os, resource, sys

seen = {"program": sys.orig_argv, "waits": None}

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and seen["waits"] is None:
            seen["waits"] = {each: os.environ.get(each) for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}

def leave():
    seen["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    inside = [file.split("site-packages/")[1] for file in files if "site-packages/" in file]
    seen["packages"] = sorted({file.split("/")[0] for file in inside})
    with open(os.path.join(os.environ["SEEN"], str(os.getpid())), "w") as file:
        json.dump(seen, file)

sys.meta_path.insert(0, Watch())
atexit.register(leave)
"""


@dataclass(frozen=True)
class Seen:
    """folder: of the run. output: of the command. processes: what the hook saw in each, by the module that it ran."""

    folder: Path
    output: str
    processes: dict[str, dict[str, Any]]

    @property
    def packages(self) -> set[str]:
        return {package for process in self.processes.values() for package in process["packages"]}


def watched(folder: Path, *command: str, **variables: str) -> Seen:
    """Runs Python with the hook in it and in its children, and without bytecode of libraries."""
    (folder / "hook").mkdir()
    (folder / "seen").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_", "PYTHON"))
    }
    environment |= {"PYTHONPATH": f"{folder / 'hook'}:{ROOT}", "SEEN": str(folder / "seen"), **variables}
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_within([sys.executable, *command], 600, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads(file.read_text()) for file in (folder / "seen").iterdir()]
    names = [next(each for each in one["program"][1:] if not each.startswith("-")) for one in seen]
    return Seen(folder / "run", done.stdout + done.stderr, dict(zip(names, seen, strict=True)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("run")
    return watched(folder, "-m", "moerl", "train", "recipe=tiny", f"run_dir='{folder / 'run'}'", *IN_PROCESS, *FEW)


def test_every_process_of_a_run_bounds_how_long_threads_spin_before_it_imports_torch(run: Seen) -> None:
    waits = {name: process["waits"] for name, process in run.processes.items() if process["waits"] is not None}
    bounded = {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": None}
    assert waits == dict.fromkeys(("moerl", "moerl.ranks.process", "moerl.rollout.engine_process.process"), bounded)


def test_a_first_run_in_a_new_environment_shows_no_warning_of_libraries(run: Seen) -> None:
    assert "Warning" not in run.output


def test_the_memory_of_a_run_is_that_of_all_its_processes(run: Seen) -> None:
    used = sum(process["rss_bytes"] for process in run.processes.values())
    assert json.loads((run.folder / "summary.json").read_text())["peak_rss_bytes"] == pytest.approx(used, rel=0.05)


def test_set_up_compiles_every_package_that_a_run_imports(run: Seen, tmp_path: Path) -> None:
    text = (ROOT / "scripts" / "setup.sh").read_text()
    [warm_up] = re.findall(r"^WARM_UP='(.*?)'$", text, re.MULTILINE | re.DOTALL)
    compiled = watched(tmp_path, "-c", warm_up)
    assert run.packages - compiled.packages == set()


def test_what_the_user_says_of_waiting_holds_in_every_process(tmp_path: Path) -> None:
    seen = watched(tmp_path, "-m", "moerl", "train", "recipe=tiny", "run_dir=run", *FEW, OMP_WAIT_POLICY="PASSIVE")
    assert seen.processes["moerl"]["waits"] == {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": "PASSIVE"}
