"""How threads of torch wait is settled before torch is imported, in every program of moerl."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from waiting import run_within

from moerl.machine.server_environment import server_environment
from moerl.machine.torch_start import TF32, before_cuda, before_torch, has_tf32, uncollected

ROOT = Path(__file__).parents[3]
WITH_TORCH = {
    *("moerl.__main__", "moerl.ranks.process", "moerl.rollout.engine_process.process", "moerl.rollout.scoring_process")
}
WITHOUT_TORCH = {
    *("moerl.launch.slurm.attempts", "moerl.launch.slurm.sweeps", "moerl.ranks.on_ray.nodes"),
    *("moerl.processes.guard", "moerl.tasks.rewards.worker"),
    *("moerl.telemetry.metrics", "moerl.telemetry.trackers.process"),
}
WITH_TRANSFORMERS_ALONE = {"moerl.orchestration.template_worker"}
LEADS_TO_TORCH = re.compile(r"moerl\.(orchestration|offline)|MODULES_OF_RUNS")
IMPORT_ALL = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "tokenizers", "safetensors", "megatron", "numba"):
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
    done = run_within([sys.executable, "-c", IMPORT_ALL, *names], 300, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_modules_of_the_controller_are_imported_without_torch() -> None:
    folder = ROOT / "moerl" / "orchestration"
    names = {f"moerl.orchestration.{file.stem}" for file in folder.glob("*.py")} - WITH_TRANSFORMERS_ALONE
    assert {"moerl.orchestration.rl", "moerl.orchestration.commands"} <= names
    done = run_within([sys.executable, "-c", IMPORT_ALL, *sorted(names)], 300, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", sorted(WITH_TORCH))
def test_a_program_with_torch_first_settles_how_its_threads_wait(program: str) -> None:
    name = "moerl.cli" if program == "moerl.__main__" else program
    source = ast.parse((ROOT / Path(*name.split(".")).with_suffix(".py")).read_text())
    [main] = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    body = main.body
    if program != "moerl.__main__":
        # Statements of `with connected(...)`, which has no torch either (test above).
        [block] = [node for node in body if isinstance(node, ast.With)]
        assert body.index(block) == 0
        body = block.body
    calls = [ast.unparse(node) for node in body]
    at = calls.index("before_torch()")
    assert not any("import " in text or "_serve" in text or "_dispatch" in text for text in calls[:at])


@pytest.mark.parametrize(
    ("tf32", "given", "wanted"), [("off", None, "0"), ("off", "1", "0"), ("on", None, None), ("on", "0", "0")]
)
def test_products_are_exact_before_cuda_begins_if_they_are_to_be(
    tf32: str, given: str | None, wanted: str | None
) -> None:
    environment = {} if given is None else {TF32: given}
    before_cuda(tf32, environment=environment)
    assert environment.get(TF32) == wanted
    assert has_tf32(environment) == (wanted != "0")


def test_libraries_are_told_before_cuda_begins_that_kernels_have_to_be_deterministic() -> None:
    environment = dict[str, str]()
    before_cuda("on", environment=environment)
    assert environment == {}
    before_cuda("on", deterministic=True, environment=environment)
    assert environment == {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_commands_set_the_precision_of_products_before_they_import_torch() -> None:
    tree = ast.parse((ROOT / "moerl" / "cli.py").read_text())
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    of_run = "config.trainer.tf32, deterministic=config.trainer.deterministic"
    wanted = {"_get_ready": of_run, "_verify": "'off'", "_diagnose": "'off'"}
    for name, precision in wanted.items():
        lines = [ast.unparse(each) for each in functions[name].body]
        at = lines.index(f"before_cuda({precision})")
        with_torch = [i for i, line in enumerate(lines) if LEADS_TO_TORCH.search(line)]
        assert with_torch
        assert all(i > at for i in with_torch)


def test_a_process_ends_without_a_search_for_garbage():
    code = (
        "import atexit, gc; from moerl.machine.torch_start import before_torch\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000)); before_torch({})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


def test_imports_are_not_searched_for_garbage_and_others_are_also_behind_an_error():
    def fails() -> None:
        with uncollected():
            assert not gc.isenabled()
            with uncollected():
                pass
            assert not gc.isenabled(), "not by the inner one"
            raise ImportError

    with pytest.raises(ImportError):
        fails()
    assert gc.isenabled()
