"""Commands if packages are not installed: without torch and its like, without all extras, and without any package."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from named_things import COMMAND_NAMES, ROOT
from packaging.requirements import Requirement
from waiting import run_within

EVERY_COMMAND = '''
import contextlib, io, json, sys, traceback

hidden, commands = json.loads(sys.argv[1])

class Hiding:
    """A finder that does not find what is named: no module, and no distribution of it."""
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self._finder.find_spec(name, path, target)
    def find_distributions(self, *words):
        find = getattr(self._finder, "find_distributions", lambda *_: ())
        return [found for found in find(*words) if not self._is_hidden(found.metadata["Name"] or "")]
    def _is_hidden(self, distribution):
        name = distribution.lower().replace("-", "_")
        return any(name in (each, f"{each}_core", f"{each}_bridge") for each in hidden)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
from moerl.__main__ import main

if hidden:
    from moerl.launch.doctor import accelerators
    accelerators.ask_torch.__defaults__ = ("/no/python",)
done = {}
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["moerl", *command.split()]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main()
        except BaseException:
            status = "raised"
            traceback.print_exc(file=err)
    done[command] = [status, out.getvalue(), err.getvalue()]
print(json.dumps(done))
'''
HEAVY = ("torch", "megatron", "transformers", "ray", "transformer_engine", "sglang")
EXTRAS = (
    *("tokenizers", "safetensors", "einops", "numba", "matplotlib", "tensorboard"),
    *("datasets", "math_verify", "reasoning_gym"),
)
"""Modules of the extras of moerl besides `HEAVY`."""
Done = dict[str, tuple[int, str, str]]
"""Status, output and errors of each command."""
REACH = {
    "train": "train recipe=tiny run_dir=train",
    "sft": "sft recipe=tiny run_dir=sft",
    "rollout": "rollout recipe=tiny run_dir=rollout",
    "eval": "eval recipe=tiny run_dir=eval",
    "plan memory": "plan memory recipe=tiny",
    "plan weights": "plan weights recipe=tiny",
    "plan run": "plan run recipe=tiny",
    "launch slurm": "launch slurm recipe=tiny run_dir=job --time 30 --site site.yaml --dry-run",
    "doctor": "doctor recipe=tiny",
    "diagnose": "diagnose dump --model model",
    "sglang install": "sglang install --env env --python /no/python",
    "sglang check": "sglang check --env env",
    "serve": "serve --model model --folder served --env env",
    "verify": "verify dump --model model",
    "export": "export none --output out",
    "conformance": "conformance --embedded --model model",
    **{name: f"{name} none" for name in ("status", "report", "samples", "watch")},
}
"""Arguments by command, with which it gets as far as it can without what it needs."""
JOB_OF_THIS_PYTHON = REACH["launch slurm"].replace("--site site.yaml ", "")
"""A job that uses the interpreter that submits it."""
DOCTOR_OF_SERVERS = "doctor recipe=tiny rollout=sglang"
SITE = "python: /opt/moerl/bin/python\n"
WORK = {"plan memory", "plan weights", "plan run", "launch slurm"}
"""Commands that end well without torch."""
NEED = {"train", "sft"}
"""Commands that get to the import of torch."""
POLICIES = f"diagnose {ROOT}/tests/golden/dumps/nemo_rl/train_data_step4.jsonl --output page.html"
TORCH_FILE = f"diagnose {ROOT}/tests/golden/dumps/slime/train.pt --output page.html"


def run_all(hidden: tuple[str, ...], commands: list[str], folder: Path, *options: str) -> Done:
    """Runs commands in one process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    words = [sys.executable, "-W", "ignore", *options, "-c", EVERY_COMMAND, json.dumps([hidden, commands])]
    done = run_within(words, 300, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "dump").write_bytes(b"")
    (folder / "site.yaml").write_text(SITE)
    helps = [*(f"{name} --help" for name in COMMAND_NAMES), "--help"]
    return run_all(HEAVY, [*REACH.values(), JOB_OF_THIS_PYTHON, *helps], folder)


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("without_extras")
    (folder / "site.yaml").write_text(SITE)
    more = [JOB_OF_THIS_PYTHON, DOCTOR_OF_SERVERS, POLICIES, TORCH_FILE]
    return run_all((*HEAVY, *EXTRAS), [*REACH.values(), *more, *(f"{name} --help" for name in COMMAND_NAMES)], folder)


def test_every_command_is_tried() -> None:
    assert set(REACH) == COMMAND_NAMES


def test_no_command_ends_in_a_traceback_without_the_heavy_packages(without_torch: Done) -> None:
    for command, (status, _, errors) in without_torch.items():
        assert status != "raised", f"{command}: {errors}"
        assert "Traceback" not in errors, f"{command}: {errors}"
        if status not in (0, 1):
            assert errors.splitlines()[-1].startswith("error: "), f"{command}: {errors}"


def test_help_plans_and_dry_runs_work_without_the_heavy_packages(without_torch: Done) -> None:
    work = {"--help", *(f"{name} --help" for name in COMMAND_NAMES), *(REACH[name] for name in WORK)}
    assert {command: without_torch[command][2] for command in work if without_torch[command][0] != 0} == {}


def test_a_command_that_needs_torch_says_so_in_one_sentence(without_torch: Done) -> None:
    for name in NEED:
        status, _, errors = without_torch[REACH[name]]
        assert status == 2, errors
        assert f"error: {name}: a package is not installed; seen: no module " in errors, errors
        assert "`make setup` in a checkout; else pip install" in errors


def test_a_job_of_an_interpreter_without_torch_is_refused_and_one_of_another_is_not(without_torch: Done) -> None:
    status, _, errors = without_torch[JOB_OF_THIS_PYTHON]
    assert status == 2, errors
    assert "error: python: the job would run in an interpreter that lacks what `moerl train` needs" in errors
    assert "torch missing, transformers missing, megatron-core missing, megatron-bridge missing, for " in errors
    assert "with its extra `train`" in errors
    status, shown, errors = without_torch[REACH["launch slurm"]]
    assert status == 0, errors
    assert "note: packages: not looked at from here: what `moerl train` needs, in /opt/moerl/bin/python" in shown


def test_modules_of_all_extras_are_hidden() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        Requirement(text).name
        for name in ("tasks", "hf", "train", "ray")
        for text in project["optional-dependencies"][name]
    ]
    modules = {name.removesuffix("-core").replace("-", "_") for name in named} - {"moerl"}
    assert modules <= {*HEAVY, *EXTRAS}


def test_plans_help_and_diagnoses_of_two_policies_need_no_extra(without_extras: Done) -> None:
    for command in ("plan memory", "plan weights", "plan run"):
        assert without_extras[REACH[command]][0] == 0, without_extras[REACH[command]]
    status, shown, errors = without_extras[POLICIES]
    assert (status, "report: " in shown) == (0, True), errors
    assert {name for name in COMMAND_NAMES if without_extras[f"{name} --help"][0] != 0} == set()


def test_a_command_names_the_extra_that_it_needs(without_extras: Done) -> None:
    for command, extra in ((REACH["train"], "train"), (REACH["launch slurm"], "tasks"), (TORCH_FILE, "hf")):
        status, _, errors = without_extras[command]
        assert status == 2, errors
        assert f"else pip install the wheel of moerl with its extra `{extra}`" in errors, errors


def test_doctor_lists_what_is_missing_and_does_not_fail_itself(without_torch: Done) -> None:
    status, shown, errors = without_torch[REACH["doctor"]]
    assert status == 1, errors
    assert "red     accelerators | torch: " in shown


def test_doctor_shows_a_package_that_a_check_needs_as_red_and_goes_on(without_extras: Done) -> None:
    for command in (REACH["doctor"], DOCTOR_OF_SERVERS):
        status, shown, errors = without_extras[command]
        assert status == 1, errors
        assert re.search(r"red +packages \| pins: .*torch missing", shown), shown
        assert re.search(r"red +run \| data: a package is not installed: no module reasoning_gym for ", shown), shown
        assert "pip install the wheel of moerl with its extra `train`" in shown
        assert re.search(r"green +run \| devices: ", shown), shown
    assert re.search(r"red +run \| SGLang environment: ", without_extras[DOCTOR_OF_SERVERS][1])


def test_every_command_names_a_missing_package_where_nothing_but_the_wheel_is_installed(tmp_path: Path) -> None:
    # -S: no packages at all. Whether a dump is there can be seen without any.
    (tmp_path / "dump").write_bytes(b"")
    done = run_all((), [*REACH.values(), "--help"], tmp_path, "-S")
    assert done.pop("--help")[0] == 0
    for command, (status, _, errors) in done.items():
        assert status == 2, f"{command}: {errors}"
        assert errors.startswith(f"error: {command.split()[0]}: a package is not installed; seen: no module "), errors
        assert errors.count("\n") == 1
