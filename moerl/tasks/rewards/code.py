"""Scores a program by running it against tests, in `moerl.tasks.rewards.sandbox`. Runs in the process of a reward."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.processes.spared import start_spared
from moerl.tasks.rewards.sandbox import BLOCKED, DONE_MARK, ERROR, MAX_FILE_BYTES, MEMORY, NO_SANDBOX

_SANDBOX = Path(__file__).with_name("sandbox.py")
_FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
OUTCOMES = ("passed", "failed", "timeout", "memory", "blocked", "error")
"""How a run of a program can end."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended: one of `OUTCOMES` but `failed`, what it wrote to standard output, and its last words."""

    outcome: str
    output: str
    said: str


def code(
    *, column: str, partial: bool, program_seconds: float, program_memory_bytes: int
) -> Callable[[Mapping[str, Any], str], dict[str, float]]:
    """The reward of programs (`moerl.tasks.rewards.section.CodeReward`)."""

    def score(row: Mapping[str, Any], response: str) -> dict[str, float]:
        tests = read_tests(row.get(column), column)
        program = program_of(response)
        outcomes = [_test(program, test, program_seconds, program_memory_bytes) for test in tests]
        passed = outcomes.count("passed") / len(outcomes)
        found = {"reward": passed if partial else float(passed == 1.0), "accuracy": float(passed == 1.0)}
        # The first that went wrong says how the program ended.
        worst = next((each for each in outcomes if each != "passed"), "passed")
        return found | {each: float(each == worst) for each in OUTCOMES}

    return score


def program_of(response: str) -> str:
    """The last fenced block of a response; all of it where there is none."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def read_tests(value: object, column: str) -> list[tuple[str, str] | str]:
    """Tests of a row: Python, or inputs with the outputs that they must give.

    Raises:
        ValueError: It has none, or they have another form.
    """
    found: Any = value
    if isinstance(found, str) and found.lstrip().startswith(("[", "{")):
        found = json.loads(found)
    if isinstance(found, Mapping) and {"inputs", "outputs"} <= found.keys():
        pairs = zip(found["inputs"], found["outputs"], strict=True)
        found = [{"input": given, "output": wanted} for given, wanted in pairs]
    if isinstance(found, str) and found.strip():
        return [found]
    if isinstance(found, list) and found and all(isinstance(each, str) for each in found):
        return ["\n".join(found)]
    if isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found):
        return [(str(each["input"]), str(each["output"])) for each in found]
    raise ValueError(f"column {column!r} has no tests: {str(value)[:80]!r}")


def _test(program: str, test: tuple[str, str] | str, seconds: float, memory_bytes: int) -> str:
    if isinstance(test, str):
        return run_program(f"{program}\n\n{test}\n", "", seconds, memory_bytes).outcome
    run = run_program(program, test[0], seconds, memory_bytes)
    if run.outcome != "passed":
        return run.outcome
    return "passed" if _lines(run.output) == _lines(test[1]) else "failed"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_program(program: str, given: str, seconds: float, memory_bytes: int) -> Run:
    """Runs Python in a sandbox of its own, and leaves nothing behind.

    Args:
        given: standard input.
        seconds: wall-clock time that it may take.

    Raises:
        RuntimeError: There is no sandbox on this machine.
    """
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="moerl-program-") as outside:
        folder = Path(outside, "work")
        folder.mkdir()
        Path(outside, "program.py").write_text(program, encoding="utf-8", errors="replace")
        Path(outside, "in").write_text(given, encoding="utf-8", errors="replace")
        done, write = os.pipe()
        os.write(write, token.encode())
        os.close(write)
        words = [str(Path(outside, "program.py")), str(folder), str(done), str(seconds), str(memory_bytes)]
        with (
            Path(outside, "in").open("rb") as stdin,
            Path(outside, "out").open("w+b") as stdout,
            Path(outside, "said").open("w+b") as stderr,
        ):
            process = start_spared(
                [sys.executable, "-I", str(_SANDBOX), *words],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env={**_ENVIRONMENT, "TMPDIR": str(folder), "HOME": str(folder)},
                pass_fds=[done],
            )
            try:
                returned: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                returned = None
            finally:
                process.kill()
                process.wait()
                os.close(done)
            output, said = (_read(file.name) for file in (stdout, stderr))
    return Run(_outcome(returned, said, token), output, said[-500:])


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(MAX_FILE_BYTES).decode(errors="replace")


def _outcome(returned: int | None, said: str, token: str) -> str:
    if returned == NO_SANDBOX:
        raise RuntimeError(f"programs cannot be run safely on this machine: {said[-200:]}")
    if returned == 0:
        # Without the token the program has ended itself, perhaps before its tests.
        return "passed" if said.endswith(DONE_MARK + token) else "failed"
    by_code = {None: "timeout", -24: "timeout", MEMORY: "memory", BLOCKED: "blocked", ERROR: "error"}
    return by_code.get(returned, "error")
