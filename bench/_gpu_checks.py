"""Checks of a device: what one is, how several run side by side within their time, what came of each. Torch-free.

A check is a process of its own, with all that it starts in its process group: one that crashes the CUDA context, is
killed or hangs ends nothing but itself.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from _report import Result

ROOT = Path(__file__).parents[1]
_CHILD = Path(__file__).with_name("_gpu_child.py")
_POLL_SECONDS = 0.05
_LOG_LINES = 25

_answer_path: Path | None = None

Device = Literal["cuda", "cpu"]
State = Literal["passed", "FAILED", "not run"]


@dataclass(frozen=True, slots=True)
class Check:
    """A question to a device, answered by a function in a process of its own."""

    name: str
    """Also that of its file of results."""
    target: str
    """``module:function``; the function takes the type of the device and returns `Findings`."""
    limit_seconds: float
    """After so long it is killed, and has failed."""
    needs: tuple[str, ...] = ("torch",)
    """Packages without which it cannot run."""
    needs_on_cuda: tuple[str, ...] = ()
    """More of them, on an NVIDIA device."""
    gib: float = 2.0
    """Memory of the device that the check may use, if it runs side by side with others."""
    times: bool = False
    """Measures times, so that it runs alone."""

    def missing(self, device: Device) -> list[str]:
        """The packages that it needs and that are not installed."""
        needs = (*self.needs, *(self.needs_on_cuda if device == "cuda" else ()))
        return [name for name in needs if not _is_installed(name)]


@dataclass(frozen=True, slots=True)
class Findings:
    """Measurements of a check."""

    results: list[Result]
    left_out: list[str] = field(default_factory=list)
    """The parts that could not run, each with its reason."""
    texts: dict[str, str] = field(default_factory=dict)
    """By name: tables for readers, each written to a file of its own."""

    def missed(self) -> list[Result]:
        """The results that do not keep their limit."""
        return [result for result in self.results if not result.holds]


class CannotRunError(Exception):
    """Raised by a check that this machine has not got what it takes; the reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a check."""

    name: str
    state: State
    seconds: float = 0.0
    reason: str = ""
    """Why it failed or was not run."""
    log: tuple[str, ...] = ()
    """The end of its output, if it failed without results."""
    findings: Findings | None = None


class _Running:
    """The process of one check, from its start until its outcome is known."""

    def __init__(self, check: Check, device: Device) -> None:
        self.check = check
        self._folder = tempfile.TemporaryDirectory()
        self._answer, self._log = Path(self._folder.name) / "answer.json", Path(self._folder.name) / "log"
        command = [sys.executable, str(_CHILD), check.target, device, str(self._answer), str(os.getpid())]
        self._start = time.monotonic()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(device),
                start_new_session=True,
            )

    def outcome(self) -> Outcome | None:
        """None as long as it runs within its limit. Otherwise its whole process group is gone."""
        seconds = time.monotonic() - self._start
        # The process is not reaped: no other one can have its number when the group is killed.
        is_done = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not is_done and seconds < self.check.limit_seconds:
            return None
        status = self._kill()
        name, lines = self.check.name, tuple(deque(self._lines(), maxlen=_LOG_LINES))
        problem = _problem(self.check, status if is_done else None, self._answer, lines)
        answered = _outcome(name, seconds, json.loads(self._answer.read_text())) if self._answer.exists() else None
        if problem:
            return Outcome(name, "FAILED", seconds, problem, lines, answered and answered.findings)
        assert answered is not None
        return answered

    def close(self) -> None:
        if self._process.returncode is None:
            self._kill()
        self._folder.cleanup()

    def _kill(self) -> int:
        os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()


def run_check(check: Check, device: Device) -> Outcome:
    """Runs a check in a process of its own; its whole process group is gone afterwards."""
    (outcome,) = run_side_by_side([check], device, check.gib)
    return outcome


def run_side_by_side(checks: Sequence[Check], device: Device, gib: float, until: float = math.inf) -> Iterator[Outcome]:
    """Runs checks, as many at once as there are cores and as fit into memory together, and yields what came of each as
    it ends.

    Args:
        gib: memory of the device for all that run at once. A check that asks for more runs alone.
        until: by `time.monotonic`; a check that may take longer when it is its turn is not run.
    """
    waiting: list[Check] = []
    for check in checks:
        if missing := check.missing(device):
            yield Outcome(check.name, "not run", reason=f"not installed: {', '.join(missing)}")
        else:
            waiting.append(check)
    running: list[_Running] = []
    try:
        while waiting or running:
            taken = sum(each.check.gib for each in running)
            if waiting and len(running) < (os.cpu_count() or 1) and (not running or taken + waiting[0].gib <= gib):
                check, left = waiting.pop(0), max(0.0, until - time.monotonic())
                if check.limit_seconds <= left:
                    running.append(_Running(check, device))
                else:
                    reason = f"no time left: may take {check.limit_seconds:g} s, and {left:.0f} s are left"
                    yield Outcome(check.name, "not run", reason=reason)
                continue
            for each in list(running):
                if (outcome := each.outcome()) is not None:
                    running.remove(each)
                    each.close()
                    yield outcome
            time.sleep(_POLL_SECONDS)
    finally:
        for each in running:
            each.close()


def keep(findings: Findings) -> None:
    """Stores what a check has measured so far: it stands if the check is killed, or fails, later."""
    if _answer_path is not None:
        write_answer(_answer_path, findings)


def answer_at(path: Path) -> None:
    """Tells `keep`, in the process of a check, the place where its parent looks for an answer."""
    global _answer_path
    _answer_path = path


def write_answer(path: Path, answer: Findings | CannotRunError) -> None:
    """Writes, in the process of a check, what its parent reads."""
    if isinstance(answer, CannotRunError):
        values: dict[str, Any] = {"cannot_run": str(answer)}
    else:
        fields = Result.__dataclass_fields__
        values = {
            "results": [{name: getattr(result, name) for name in fields} for result in answer.results],
            "left_out": answer.left_out,
            "texts": answer.texts,
        }
    # Whole or not at all, whenever the process is killed.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(values))
    unfinished.replace(path)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def _outcome(name: str, seconds: float, answer: dict[str, Any]) -> Outcome:
    if "cannot_run" in answer:
        return Outcome(name, "not run", seconds, answer["cannot_run"])
    findings = Findings([Result(**values) for values in answer["results"]], answer["left_out"], answer["texts"])
    missed = [f"{result.name}: {result.value:.4g}, not {result.goal}" for result in findings.missed()]
    return Outcome(name, "FAILED" if missed else "passed", seconds, "; ".join(missed), findings=findings)


def _problem(check: Check, status: int | None, answer: Path, lines: tuple[str, ...]) -> str:
    """Returns why a process has no results; empty if it has some. status: None if it was killed at its limit."""
    if status is None:
        return f"not done within its {check.limit_seconds:g} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if status > 0:
        return f"ended with status {status}: {lines[-1] if lines else 'no output'}"
    return "" if answer.exists() else "ended without results"


def _environment(device: Device) -> dict[str, str]:
    """A check on a CPU sees no GPU, and Triton interprets its kernels there."""
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return environment
