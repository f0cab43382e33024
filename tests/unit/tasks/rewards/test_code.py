"""Programs of a model: scored by tests, and stopped where they do what they must not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from moerl.tasks.rewards.builtin import last_block
from moerl.tasks.rewards.code import OUTCOMES, ProgramResult, code, read_tests, run_program

GIB = 1 << 30


@pytest.mark.parametrize(
    ("program", "outcome", "said"),
    [
        ("import os\nos.fork()", "blocked", "Operation not permitted"),
        ("import subprocess\nsubprocess.run(['true'])", "blocked", "Operation not permitted"),
        ("import socket\nsocket.socket()", "blocked", "Operation not permitted"),
        ("import os\nos.kill(os.getppid(), 9)", "blocked", "Operation not permitted"),
        ("open('{outside}/new', 'w')", "blocked", "Permission denied"),
        ("import os\nos.remove('{outside}/there')", "blocked", "Permission denied"),
        ("import os\nos.rename('{outside}/there', 'here')", "blocked", "Permission denied"),
        ("import os\nos.chmod('{outside}/there', 0o777)", "blocked", "Operation not permitted"),
        ("open('{outside}/there')", "blocked", "Permission denied"),
        ("open('/proc/1/environ')", "blocked", "Permission denied"),
        ("bytearray(1 << 40)", "memory", "MemoryError"),
        ("while True: pass", "timeout", ""),
        ("import time\ntime.sleep(60)", "timeout", ""),
        ("while True: print('x' * 4096)", "error", "File too large"),
        ("open('big', 'wb').write(bytes(1 << 25))", "error", "File too large"),
        ("import os\nos.abort()", "error", ""),
        ("raise ValueError('no')", "error", "ValueError: no"),
        ("def f(): f()\nf()", "error", "RecursionError"),
        ("this is no Python", "error", "SyntaxError"),
        ("import os\nos._exit(93)", "error", ""),
        ("import sys\nsys.exit(3)", "error", "code 3"),
    ],
)
def test_a_program_that_does_what_it_must_not_is_stopped_and_named(
    program: str, outcome: str, said: str, tmp_path: Path
):
    (tmp_path / "there").write_text("secret")
    patient = outcome != "timeout"
    run = run_program(program.replace("{outside}", str(tmp_path)), "", 30.0 if patient else 1.0, GIB)
    assert (run.outcome, said in run.said) == (outcome, True), run
    assert sorted(os.listdir(tmp_path)) == ["there"]
    assert (tmp_path / "there").read_text() == "secret"


def test_a_program_may_compute_start_threads_and_write_into_its_folder():
    program = """
import threading, json, re, asyncio, tempfile
found = []
thread = threading.Thread(target=lambda: found.append(int(input())))
thread.start()
thread.join()
open("note.txt", "w").write(str(found[0] + 1))
async def read(): return open("note.txt").read()
print(asyncio.run(read()))
"""
    run = run_program(program, "41\n", 30.0, GIB)
    assert (run.outcome, run.output) == ("passed", "42\n"), run


def test_what_a_program_leaves_is_removed_and_it_sees_no_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "moerl")
    program = "import os\nopen('left', 'w')\nprint(os.getcwd(), 'SECRET_KEY' in os.environ)"
    folder, has_key = run_program(program, "", 30.0, GIB).output.split()
    assert has_key == "False"
    assert not Path(folder).exists()


def test_a_program_ends_with_its_threads_and_what_it_registered_for_its_exit():
    program = """
import atexit, threading, time
def late():
    time.sleep(0.2)
    print("thread")
threading.Thread(target=late).start()
atexit.register(print, "exit")
"""
    assert run_program(program, "", 30.0, GIB).output == "thread\nexit\n"


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
        "import os\nos.makedirs('a/b')\nopen('a/b/f', 'w')\nos.mkdir('c', 0)\nos.symlink('/', 'a/b/link')",
    ],
)
def test_folders_of_a_program_are_removed_however_deep_and_closed(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_program(program, "", 30.0, GIB).outcome == "passed"
    assert list(tmp_path.iterdir()) == []


PAIRS = [{"input": "1 2", "output": "3\n"}, {"input": "2 5", "output": "7"}, {"input": "0 0", "output": "1"}]


def score(response: str, tests: object, *, partial: bool = False) -> dict[str, float]:
    function = code(column="tests", partial=partial, program_seconds=30.0, program_memory_bytes=GIB)
    found = function({"tests": tests}, response)
    assert sum(found[name] for name in OUTCOMES) == 1.0
    return found


def test_a_program_gets_the_share_of_its_tests_or_all_or_nothing():
    response = "Read two numbers:\n```python\nprint(sum(map(int, input().split())))\n```\nThat is all."
    assert score(response, PAIRS[:2])["reward"] == 1.0
    found = score(response, PAIRS)
    assert (found["reward"], found["accuracy"], found["failed"]) == (0.0, 0.0, 1.0)
    assert score(response, json.dumps(PAIRS), partial=True)["reward"] == pytest.approx(2 / 3)


def test_tests_in_python_follow_the_program():
    response = "```python\ndef add(a, b):\n    return a + b\n```"
    assert score(response, "assert add(1, 2) == 3")["passed"] == 1.0
    assert score(response, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"])["failed"] == 1.0
    assert score(response, "assert add(1, '2') == 3")["error"] == 1.0


def test_the_last_block_is_the_program_and_without_one_the_response_is():
    assert last_block("```\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert last_block("print(1)") == "print(1)"


@pytest.mark.parametrize("value", [None, "", [], {}, [1], 3])
def test_a_row_without_tests_fails_and_is_no_reward_of_zero(value: object):
    with pytest.raises(ValueError, match="column 'tests' has no tests"):
        read_tests(value, "tests")


def test_inputs_and_outputs_in_two_lists_are_pairs():
    assert read_tests({"inputs": ["1"], "outputs": ["2"]}, "tests") == [("1", "2")]


@pytest.mark.parametrize("wrap", [lambda cases: cases, json.dumps, lambda cases: {"test_cases": cases}])
@pytest.mark.parametrize("more", [{}, {"fn_name": None, "type": "stdin_stdout"}, {"testtype": "stdin"}])
def test_cases_of_standard_input_are_read_as_sets_of_the_hub_have_them(wrap: Callable[..., Any], more: dict[str, Any]):
    assert read_tests(wrap([{"input": "1\n", "output": "2\n", **more}]), "tests") == [("1\n", "2\n")]


@pytest.mark.parametrize(
    "value",
    [
        [{"input": "1", "output": "2", "fn_name": "add", "type": "stdin_stdout"}],
        [{"input": "1", "output": "2"}, {"input": "1", "output": "2", "testtype": "functional"}],
        {"test_cases": [{"input": "[1]", "output": "2", "type": "function_call"}]},
        {"inputs": [[1]], "outputs": [2], "fn_name": "add"},
    ],
)
def test_tests_that_call_a_function_are_a_fault_of_the_row(value: object):
    with pytest.raises(ValueError, match="tests that call a function, or are of an unknown kind"):
        read_tests(value, "tests")


def test_after_a_test_that_fails_the_rest_is_run_only_for_a_share(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def run(program: str, given: str, *_: Any) -> ProgramResult:
        asked.append(given)
        return ProgramResult("passed", given, "")

    monkeypatch.setattr("moerl.tasks.rewards.code.run_program", run)
    tests = [{"input": each, "output": wanted} for each, wanted in (("1", "1"), ("2", "-"), ("3", "3"))]
    assert (score("", tests)["reward"], asked) == (0.0, ["1", "2"])
    asked.clear()
    assert (score("", tests, partial=True)["reward"], asked) == (pytest.approx(2 / 3), ["1", "2", "3"])


def test_a_program_under_way_ends_with_its_reward(tmp_path: Path):
    from scored_process import ScoredProcess

    from moerl.tasks.rewards.process import UNSCORED

    settings = {"column": "tests", "partial": False, "program_seconds": 600.0, "program_memory_bytes": GIB}
    process = ScoredProcess("moerl.tasks.rewards.code:code", 4.0, 1 << 32, "task.rewards.code.function", settings)
    try:
        rewards = process.score({"tests": "f()"}, "import time\ndef f(): time.sleep(500)")
    finally:
        process.close()
    assert (rewards["reward"], rewards[UNSCORED]) == (0.0, 1.0)
    eventually(lambda: not _sandboxes(), 10.0)


def _sandboxes() -> list[str]:
    """Sandboxes that sleep for 600 seconds, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"rewards.sandbox" in word for word in words) and b"600.0" in words:
            found.append(str(path))
    return found
