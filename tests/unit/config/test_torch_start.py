"""How threads of torch wait is settled before torch is imported, in every program of moerl."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from moerl.config.server_environment import server_environment
from moerl.config.torch_start import before_torch

ROOT = Path(__file__).parents[3]
WITH_TORCH = {"moerl.__main__", "moerl.ranks.process", "moerl.rollout.beside.process"}
WITHOUT_TORCH = {
    *("moerl.launch.slurm.attempts", "moerl.launch.slurm.sweeps", "moerl.ranks.on_ray.nodes"),
    *("moerl.tasks.rewards.guard", "moerl.tasks.rewards.worker"),
    *("moerl.telemetry.metrics", "moerl.telemetry.trackers.process"),
}
WITH_TRANSFORMERS_ALONE = {"moerl.orchestration.template_worker"}
IMPORT_ALL = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "megatron", "numba"):
            raise RuntimeError(f"{name} was imported")

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, None),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_sleep_after_a_short_wait_unless_the_user_has_said_how_they_wait(
    given: dict[str, str], spins: str | None
) -> None:
    environment = dict(given)
    with warnings.catch_warnings():
        before_torch(environment)
    assert environment.get("GOMP_SPINCOUNT") == spins
    assert environment.items() >= given.items()


@pytest.mark.parametrize(("folder", "is_shown"), [("lib/python3.12/site-packages/theirs", False), ("mine", True)])
def test_the_compiler_speaks_of_ones_own_files_and_not_of_libraries(
    folder: str, is_shown: bool, tmp_path: Path
) -> None:
    file = tmp_path / folder / "odd.py"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before_torch({})
        compile('1 is "1"', str(file), "exec")
    assert bool(caught) == is_shown


def test_servers_get_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    for device in ("cpu", "cuda"):
        assert server_environment(device, 1)["GOMP_SPINCOUNT"] == "7"


def programs() -> set[str]:
    """Modules of moerl that run as programs, by name."""
    found = set[str]()
    for file in (ROOT / "moerl").rglob("*.py"):
        tests = [node.test for node in ast.parse(file.read_text()).body if isinstance(node, ast.If)]
        if any(ast.unparse(test) == "__name__ == '__main__'" for test in tests):
            found.add(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return found


def test_every_program_imports_torch_after_it_has_begun_or_never() -> None:
    assert programs() == WITH_TORCH | WITHOUT_TORCH | WITH_TRANSFORMERS_ALONE
    names = sorted(WITH_TORCH | WITHOUT_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", sorted(WITH_TORCH))
def test_a_program_with_torch_first_settles_how_its_threads_wait(program: str) -> None:
    name = "moerl.cli" if program == "moerl.__main__" else program
    source = ast.parse((ROOT / Path(*name.split(".")).with_suffix(".py")).read_text())
    [main] = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    calls = [ast.unparse(node) for node in main.body]
    at = calls.index("before_torch()")
    assert not any("import " in text or "_serve" in text or "_dispatch" in text for text in calls[:at])
