"""Checks of a device: what one is, how it runs in a process of its own within its time, what came of it. Torch-free.

A process of its own, with all that it starts in its process group, so that a check that crashes the CUDA context, is
killed or hangs ends nothing but itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from _report import Result

ROOT = Path(__file__).parents[1]
_CHILD = Path(__file__).with_name("_gpu_child.py")
_POLL_SECONDS = 0.05
_LOG_LINES = 25

Device = Literal["cuda", "cpu"]
State = Literal["passed", "FAILED", "not run"]


@dataclass(frozen=True, slots=True)
class Check:
    """name: of the check and its file of results. target: ``module:function`` of what it calls with the device's type,
    which returns `Findings`. limit_seconds: after so long it is killed and has failed. needs: packages without which it
    cannot run. needs_on_cuda: more of them, on an NVIDIA device."""

    name: str
    target: str
    limit_seconds: float
    needs: tuple[str, ...] = ("torch",)
    needs_on_cuda: tuple[str, ...] = ()

    def missing(self, device: Device) -> list[str]:
        """The packages that it needs and that are not installed."""
        needs = (*self.needs, *(self.needs_on_cuda if device == "cuda" else ()))
        return [name for name in needs if not _is_installed(name)]


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check measured. left_out: the parts that could not run, each with its reason."""

    results: list[Result]
    left_out: list[str] = field(default_factory=list)

    def missed(self) -> list[Result]:
        """The results that do not keep their limit."""
        return [result for result in self.results if not result.holds]


class CannotRunError(Exception):
    """Raised by a check that this machine has not got what it takes; the reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a check. reason: why it failed or was not run. log: the end of its output where it failed without
    results."""

    name: str
    state: State
    seconds: float = 0.0
    reason: str = ""
    log: tuple[str, ...] = ()
    findings: Findings | None = None


def run_check(check: Check, device: Device) -> Outcome:
    """Runs a check in a process of its own; its whole process group is gone afterwards."""
    if missing := check.missing(device):
        return Outcome(check.name, "not run", reason=f"not installed: {', '.join(missing)}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, str(_CHILD), check.target, device, str(answer), str(os.getpid())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(device),
                start_new_session=True,
            )
            try:
                is_done = _has_ended(process.pid, start + check.limit_seconds)
            finally:
                # The process is not reaped yet: no other one can have its number.
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        seconds = time.monotonic() - start
        lines = tuple(deque(log.read_text(errors="replace").splitlines(), maxlen=_LOG_LINES))
        if problem := _problem(check, status if is_done else None, answer, lines):
            return Outcome(check.name, "FAILED", seconds, problem, lines)
        return _outcome(check.name, seconds, json.loads(answer.read_text()))


def write_answer(path: Path, answer: Findings | CannotRunError) -> None:
    """For the process of a check: what `run_check` reads."""
    if isinstance(answer, CannotRunError):
        values: dict[str, Any] = {"cannot_run": str(answer)}
    else:
        fields = Result.__dataclass_fields__
        values = {
            "results": [{name: getattr(result, name) for name in fields} for result in answer.results],
            "left_out": answer.left_out,
        }
    path.write_text(json.dumps(values))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def _outcome(name: str, seconds: float, answer: dict[str, Any]) -> Outcome:
    if "cannot_run" in answer:
        return Outcome(name, "not run", seconds, answer["cannot_run"])
    findings = Findings([Result(**values) for values in answer["results"]], answer["left_out"])
    missed = [f"{result.name}: {result.value:.4g}, not {result.goal}" for result in findings.missed()]
    return Outcome(name, "FAILED" if missed else "passed", seconds, "; ".join(missed), findings=findings)


def _problem(check: Check, status: int | None, answer: Path, lines: tuple[str, ...]) -> str:
    """Why a process has no results; empty where it has. status: None where it was killed at its limit."""
    if status is None:
        return f"not done within its {check.limit_seconds:g} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if status > 0:
        return f"ended with status {status}: {lines[-1] if lines else 'no output'}"
    return "" if answer.exists() else "ended without results"


def _has_ended(pid: int, until: float) -> bool:
    """Waits for a child process until then, and leaves it to be reaped."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _environment(device: Device) -> dict[str, str]:
    """A check on a CPU sees no GPU, and Triton interprets its kernels there."""
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return environment
