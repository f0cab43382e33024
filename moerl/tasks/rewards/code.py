"""Scores of programs, run against tests in `moerl.tasks.rewards.sandbox`. Runs in the process of a reward; of the tool
`moerl.tasks.tools.python`, in threads of the controller."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.errors import ending
from moerl.processes.host import end_group, start_spared, wait_for
from moerl.tasks.rewards.builtin import last_block
from moerl.tasks.rewards.sandbox import outcomes
from moerl.tasks.rewards.sandbox.limits import MAX_FILE_BYTES

_START = "import sys; sys.path.insert(0, {!r}); from moerl.tasks.rewards.sandbox.start import main; sys.path.pop(0)"
_ROOT = str(Path(__file__).parents[3])
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
OUTCOMES = ("passed", "failed", "timeout", "memory", "blocked", "error")
"""Outcomes of a run of a program."""

_OF_LIMITS = {
    **{outcomes.MEMORY: "memory", outcomes.BLOCKED: "blocked"},
    **{-signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout"},  # signals of the limit of CPU time
}
_OF_PROGRAM = {0: "passed", **_OF_LIMITS}
"""Exit codes without tests: the program chooses them, and they say nothing about its output."""
_OF_TESTS = {outcomes.PASSED: "passed", outcomes.FAILED: "failed", outcomes.TIMEOUT: "timeout", **_OF_LIMITS}


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """End of a program, or of its tests."""

    outcome: str
    """One of `OUTCOMES`."""
    output: str
    """Standard output, at most `MAX_FILE_BYTES` of it."""
    said: str
    """Last 500 characters of standard error."""


def code(
    *, column: str, partial: bool, program_seconds: float, program_memory_bytes: int
) -> Callable[[Mapping[str, Any], str], dict[str, float]]:
    """Makes the reward of programs (`moerl.tasks.rewards.section.CodeReward`)."""

    def score(row: Mapping[str, Any], response: str) -> dict[str, float]:
        tests = read_tests(row.get(column), column)
        program, outcomes = last_block(response), list[str]()
        for test in tests:
            outcomes.append(_test(program, test, program_seconds, program_memory_bytes))
            if outcomes[-1] != "passed" and not partial:
                break  # the rest changes nothing
        passed = outcomes.count("passed") / len(tests)
        found = {"reward": passed if partial else float(passed == 1.0), "accuracy": float(passed == 1.0)}
        # The first that went wrong says how the program ended.
        worst = next((each for each in outcomes if each != "passed"), "passed")
        return found | {each: float(each == worst) for each in OUTCOMES}

    return score


def read_tests(value: object, column: str) -> list[tuple[str, str] | str]:
    """Returns the tests of a row: Python, or inputs with the outputs that they must give.

    Raises:
        ValueError: The row has no tests, they have another form, or they call a function by name.
    """
    found: Any = value
    if isinstance(found, str) and found.lstrip().startswith(("[", "{")):
        found = json.loads(found)
    if isinstance(found, Mapping) and "test_cases" in found:
        found = found["test_cases"]
    if isinstance(found, Mapping) and {"inputs", "outputs"} <= found.keys():
        _check_reads_input(found, column)
        pairs = zip(found["inputs"], found["outputs"], strict=True)
        found = [{"input": given, "output": wanted} for given, wanted in pairs]
    if isinstance(found, str) and found.strip():
        return [found]
    if isinstance(found, list) and found and all(isinstance(each, str) for each in found):
        return ["\n".join(found)]
    if isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found):
        for each in found:
            _check_reads_input(each, column)
        return [(str(each["input"]), str(each["output"])) for each in found]
    raise ValueError(f"column {column!r} has no tests: {str(value)[:80]!r}")


def _check_reads_input(test: Mapping[str, Any], column: str) -> None:
    """Refuses a test whose input is arguments of a function: as standard input it would fail every right program.

    Raises:
        ValueError: The test names a function, or is of another kind than standard input.
    """
    kind = test.get("type") or test.get("testtype") or "stdin"
    if test.get("fn_name") or kind not in ("stdin", "stdin_stdout"):
        named = test.get("fn_name") or kind
        raise ValueError(
            f"column {column!r} has tests that call a function, or are of an unknown kind ({named});"
            " write them as Python"
        )


def _test(program: str, test: tuple[str, str] | str, seconds: float, memory_bytes: int) -> str:
    if isinstance(test, str):
        return run_program(program, "", seconds, memory_bytes, test).outcome
    run = run_program(program, test[0], seconds, memory_bytes)
    if run.outcome != "passed":
        return run.outcome
    return "passed" if _lines(run.output) == _lines(test[1]) else "failed"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_program(program: str, given: str, seconds: float, memory_bytes: int, tests: str = "") -> ProgramResult:
    """Runs Python in a sandbox of its own, and leaves nothing behind.

    Args:
        given: standard input.
        seconds: wall-clock time that program and tests may take.
        memory_bytes: memory that each of their processes may take.
        tests: Python that runs after the program, in another process; it raises if the program is wrong.

    Raises:
        RuntimeError: There is no sandbox on this machine.
        ValueError: The tests use nothing of the program.
    """
    outside = Path(tempfile.mkdtemp(prefix="moerl-program-"))
    with ending(lambda: _remove(outside)):
        folder = outside / "work"
        folder.mkdir()
        (outside / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (outside / "tests.py").write_text(tests, encoding="utf-8", errors="replace")
        (outside / "in").write_text(given, encoding="utf-8", errors="replace")
        files = [str(outside / "program.py"), str(outside / "tests.py") if tests else "", str(folder)]
        returned, has_begun = _run(outside, files, seconds, memory_bytes)
        output, said = _read(outside / "out"), _read(outside / "said")
    if not has_begun and returned == outcomes.NO_SANDBOX:
        raise RuntimeError(f"programs cannot be run safely on this machine: {said[-200:]}")
    if tests and returned == outcomes.UNUSED:
        raise ValueError(f"the tests use nothing of the program, and pass with any: {tests[:80]!r}")
    by_code = _OF_TESTS if tests else _OF_PROGRAM
    return ProgramResult("timeout" if returned is None else by_code.get(returned, "error"), output, said[-500:])


def _run(outside: Path, files: Sequence[str], seconds: float, memory_bytes: int) -> tuple[int | None, bool]:
    """Runs a sandbox to its end.

    Returns:
        Its exit code, None if its time passed; and True if everything was forbidden before it ran.
    """
    status, theirs = os.pipe()
    words = [*files, str(theirs), str(os.getpid()), str(seconds), str(memory_bytes)]
    folder = files[-1]
    with (
        (outside / "in").open("rb") as stdin,
        (outside / "out").open("wb") as stdout,
        (outside / "said").open("wb") as stderr,
        open(status, "rb") as begun,
    ):
        process = start_spared(
            [sys.executable, "-I", "-c", _START.format(_ROOT) + "; main(sys.argv[1:])", *words],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env={**_ENVIRONMENT, "TMPDIR": folder, "HOME": folder},
            pass_fds=[theirs],
        )
        os.close(theirs)
        try:
            returned = wait_for(process, seconds)
        finally:
            # Neither the program nor its tests can leave their group.
            end_group(process)
        return returned, begun.read(1) == b"1"


def _remove(outside: Path) -> None:
    """Removes the folder of a run, however deep the program's is, and whatever modes it has.

    Folders in it are moved to one place before they are looked into, so no path gets long and nothing recurses.
    """
    found, moved = outside / "found", 0
    found.mkdir()
    waiting = [outside / "work"]
    while waiting:
        current = waiting.pop()
        current.chmod(0o700)
        with os.scandir(current) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    # Only a folder that may be written to can be moved: its entry for the parent changes.
                    os.chmod(entry.path, 0o700)
                    waiting.append(found / str(moved))
                    os.rename(entry.path, waiting[-1])
                    moved += 1
                else:
                    os.unlink(entry.path)
        current.rmdir()
    shutil.rmtree(outside)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode(errors="replace")
