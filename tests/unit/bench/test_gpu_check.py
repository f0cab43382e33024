"""The checks of a device run on a CPU at tiny sizes, and one that fails, hangs or crashes is named."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
QUICK = ("grouped",)
LONGER = (
    "kernels",
    "engine",
    "collectives",
    "offload",
    "parity",
    "families",
    "start",
    "proof",
    "layouts",
    "scoring",
    "rate",
    "slice16",
    "slice128",
)
NAMES = (*QUICK, *LONGER)
ON_GPUS_ALONE = ("utilisation of", "cut-cross-entropy: time", "cut-cross-entropy: peak memory")
"""Results that goals name and a CPU has not."""
LONG = 500.0
"""Seconds: a loaded machine is no fault of a check."""
PLANTED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from _gpu_checks import CannotRunError, Findings, keep
from _report import Result

def passes(device):
    return Findings([Result("a value", 1.0, "<= 2", True, "s")], ["a part: not installed"])

def misses(device):
    return Findings([Result("a value", 3.0, "<= 2", False, "s"), Result("another", 1.0, "<= 2", True)])

def raises(device):
    raise RuntimeError("no such kernel")

def hangs(device):
    # One that it started, and that would go on without it.
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["PLANTED_PID"]).write_text(str(other.pid))
    time.sleep(600)

def crashes(device):
    os.kill(os.getpid(), signal.SIGSEGV)

def cannot(device):
    raise CannotRunError("needs 75 GiB")

def keeps(device):
    keep(Findings([Result("a part", 1.0)]))
    Path(os.environ["PLANTED_PID"]).write_text(str(os.getpid()))
    time.sleep(600)

def meets(device, mine="first", other="second"):
    # Passes only if the other one runs at the same time.
    here = Path(os.environ["PLANTED_PID"])
    here.with_name(mine).write_text("")
    until = time.monotonic() + 60
    while not here.with_name(other).exists():
        if time.monotonic() > until:
            raise RuntimeError("nobody came")
        time.sleep(0.05)
    return Findings([])

def meets_too(device):
    return meets(device, "second", "first")

def alone(device):
    # Passes only if no other one runs at the same time.
    marker = Path(os.environ["PLANTED_PID"]).with_name("running")
    marker.touch(exist_ok=False)
    time.sleep(1.0)
    marker.unlink()
    return Findings([], texts={"profile": "a table"})

def alone_too(device):
    return alone(device)
"""


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gpu_check")


@pytest.fixture
def planted(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`planted(name, seconds)`: a check that does as its name says."""
    (tmp_path / "planted_checks.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PLANTED_PID", str(tmp_path / "pid"))

    def make(name: str, seconds: float = LONG, **options: Any) -> Any:
        return gpu_check.Check(name, f"planted_checks:{name}", seconds, **options)

    return make


@pytest.fixture
def a_hang_is_long(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of limits stands still until a planted check has written that it hangs, and is 20 seconds on then."""

    def monotonic() -> float:
        pid = tmp_path / "pid"
        return 20.0 if pid.exists() and pid.read_text() else 0.0

    checks = importlib.import_module("_gpu_checks")
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)])
def test_a_check_passes_on_a_cpu(name: str, gpu_check: Any) -> None:
    (check,) = [each for each in gpu_check.CHECKS if each.name == name]
    outcome = gpu_check.run_check(replace(check, limit_seconds=LONG), "cpu")
    assert outcome.state == "passed", (outcome.reason, outcome.log)
    assert any(result.goal for result in outcome.findings.results) or name in ("proof", "rate")
    goals = [goal for goal in gpu_check._gpu_goals.GOALS if goal.check == name]
    for beginning in {part for goal in goals for part in (goal.result, goal.over) if part not in ("", *ON_GPUS_ALONE)}:
        assert gpu_check._gpu_goals.result_of(outcome.findings.results, beginning), beginning
    if name.startswith("slice"):
        kinds = [result.name.partition(",")[0] for result in outcome.findings.results]
        assert kinds.index("ours / plain") < kinds.index("masks on / off"), "what is measured last is cut off first"


def test_all_checks_are_tried_on_a_cpu_and_fit_into_six_minutes_together(gpu_check: Any) -> None:
    assert sorted(check.name for check in gpu_check.CHECKS) == sorted(NAMES)
    assert gpu_check.BUDGET_SECONDS == 360
    beside = max(check.limit_seconds for check in gpu_check.CHECKS if not check.times)
    alone = sum(check.limit_seconds for check in gpu_check.CHECKS if check.times)
    # The search for a device comes first.
    assert beside + alone <= gpu_check.BUDGET_SECONDS - 10


def test_the_documentation_gives_the_limit_of_each_check(gpu_check: Any) -> None:
    page = (Path(gpu_check.ROOT) / "docs" / "gpu_check.md").read_text(encoding="utf-8")
    for check in gpu_check.CHECKS:
        assert f"| {check.name} | {check.limit_seconds:g}{', alone' * check.times} |" in page


def test_checks_of_correctness_that_run_side_by_side_fit_into_a_gpu_of_80_gib_together(gpu_check: Any) -> None:
    assert sum(check.gib for check in gpu_check.CHECKS if not check.times) <= gpu_check.DEVICE_SHARE * 80


@pytest.mark.usefixtures("a_hang_is_long")
def test_checks_that_fail_hang_or_crash_are_named_and_the_others_run(
    gpu_check: Any, planted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_DEVICE", planted("passes"))
    stale = tmp_path / "gpu-crashes.json"
    stale.write_text("[]")
    checks = [planted("misses"), planted("raises"), planted("hangs", 20.0), planted("crashes"), planted("passes")]
    assert gpu_check.main(["--device", "cpu", "--results", str(tmp_path), "--seconds", "9999"], checks) == 1
    said = capsys.readouterr().out
    assert "misses       FAILED: a value: 3, not <= 2 (" in said
    assert "raises       FAILED: ended with status 1: RuntimeError: no such kernel (" in said
    assert "    | RuntimeError: no such kernel" in said
    assert "hangs        FAILED: not done within its 20 s (" in said
    assert "crashes      FAILED: ended by SIGSEGV (" in said
    assert "passes       passed (" in said
    assert "    not run: a part: not installed" in said
    assert "\npassed: passes\nFAILED: misses, raises, hangs, crashes\nnot run: none\n" in said
    assert not stale.exists()
    assert is_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.usefixtures("a_hang_is_long")
def test_what_a_check_measured_before_it_was_killed_is_kept(gpu_check: Any, planted: Any) -> None:
    outcome = gpu_check.run_check(planted("keeps", 20.0), "cpu")
    assert (outcome.state, outcome.reason) == ("FAILED", "not done within its 20 s")
    assert [result.name for result in outcome.findings.results] == ["a part"]


def test_checks_of_correctness_run_side_by_side(gpu_check: Any, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    outcomes = list(gpu_check.run_side_by_side([planted("meets"), planted("meets_too")], "cpu", 4.0))
    assert [(outcome.state, outcome.reason) for outcome in outcomes] == [("passed", "")] * 2


def test_checks_that_do_not_fit_into_memory_together_wait_for_one_another(
    gpu_check: Any, planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    checks = [planted("alone", gib=5.0), planted("alone_too", gib=50.0)]
    outcomes = list(gpu_check.run_side_by_side(checks, "cpu", 8.0))
    assert [(outcome.state, outcome.reason) for outcome in outcomes] == [("passed", "")] * 2


def test_checks_that_measure_times_run_alone_and_write_their_tables(
    gpu_check: Any, planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(gpu_check, "_DEVICE", planted("passes"))
    stale = tmp_path / "gpu-alone-other.txt"
    stale.write_text("of an earlier run")
    checks = [planted("alone", times=True), planted("alone_too", times=True)]
    assert gpu_check.main(["--device", "cpu", "--results", str(tmp_path), "--seconds", "9999"], checks) == 0
    assert (tmp_path / "gpu-alone-profile.txt").read_text().endswith("\n\na table\n")
    assert not stale.exists()


def test_results_say_command_device_versions_and_what_was_left_out(
    gpu_check: Any, planted: Any, tmp_path: Path
) -> None:
    assert (
        gpu_check.main(["--device", "cpu", "--results", str(tmp_path), "--seconds", "9999"], [planted("passes")]) == 0
    )
    command, device, versions, value, part = json.loads((tmp_path / "gpu-passes.json").read_text())
    assert command["name"].startswith("`python bench/")
    assert device["name"].startswith("device: CPU")
    assert "commit " in versions["name"]
    assert "torch " in versions["name"]
    assert value == {"name": "a value", "value": 1.0, "goal": "<= 2", "holds": True, "unit": "s", "spread": 0.0}
    assert part["name"] == "not run: a part: not installed"
    assert json.loads((tmp_path / "gpu-summary.json").read_text())[3]["name"] == "passes: passed"
    goals = json.loads((tmp_path / "gpu-goals.json").read_text())
    assert goals["run"][0] == command
    assert {(goal["state"], goal["reason"]) for goal in goals["goals"]} == {("not measured", "no NVIDIA device")}


def test_what_cannot_run_is_said_and_is_no_success(
    gpu_check: Any, planted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_DEVICE", planted("passes"))
    kept = tmp_path / "gpu-passes.json"
    kept.write_text("[]")
    checks = [planted("cannot"), planted("raises", needs=("torch", "no_such.package")), planted("passes", 99999.0)]
    assert gpu_check.main(["--device", "cpu", "--results", str(tmp_path), "--seconds", "9999"], checks) == 1
    said = capsys.readouterr().out
    assert "cannot       not run: needs 75 GiB (" in said
    assert "raises       not run: not installed: no_such.package (" in said
    assert "passes       not run: no time left: may take 99999 s, and " in said
    assert "\npassed: none\nFAILED: none\nnot run: cannot, raises, passes\n" in said
    assert kept.read_text() == "[]"


def test_a_check_that_waited_for_others_until_its_limit_is_not_left_is_not_run(
    gpu_check: Any, planted: Any, tmp_path: Path, a_hang_is_long: None
) -> None:
    checks = importlib.import_module("_gpu_checks")
    both = [planted("keeps", 10.0, gib=8.0), planted("passes", 10.0, gib=8.0)]
    first, second = checks.run_side_by_side(both, "cpu", 8.0, until=25.0)
    assert (first.state, second.state) == ("FAILED", "not run")
    assert second.reason == "no time left: may take 10 s, and 5 s are left"


def test_without_a_device_the_script_ends_with_2_and_says_so(tmp_path: Path) -> None:
    """Whatever this machine has, the process sees no GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": str(ROOT / ".venv" / "bin" / "python")}
    command = [SCRIPT, "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no NVIDIA device to check: torch ")
    assert "run this on a machine where `nvidia-smi` lists one" in line
    assert not list(tmp_path.iterdir())


def test_without_an_environment_the_script_says_how_to_make_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": str(tmp_path / "python")}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run make setup" in done.stderr


def is_gone(pid: int) -> bool:
    """Killed, if not reaped yet; the system may take a moment."""
    for _ in range(600):
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] in ("Z", "X"):
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
