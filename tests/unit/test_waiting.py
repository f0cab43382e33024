"""Deadlines of tests count work: what a loaded machine takes longer for is no failure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import waiting

TESTS = Path(__file__).parents[1]
OF_THE_CLOCK = {
    "chaos_campaign.py": "it disturbs for so many minutes",
    "chaos_disturbances.py": "a disturbance comes at a moment of a run",
    "unit/tasks/rewards/test_child.py": "the time limit under test is in seconds",
}
"""Files that may compare the clock with a deadline, and why."""


def compares_the_clock(file: Path) -> bool:
    text = file.read_text()
    nodes = ast.walk(ast.parse(text)) if "monotonic()" in text else ()
    compared = [
        ast.unparse(side) for node in nodes if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)
    ]
    return "time.monotonic()" in compared


def test_no_other_test_has_a_deadline_of_its_own() -> None:
    found = {str(file.relative_to(TESTS)) for file in TESTS.rglob("*.py") if compares_the_clock(file)}
    assert found == set(OF_THE_CLOCK), "use `eventually`, `run_within` or `Work` of tests/waiting.py"


def has_seconds_of_the_clock(call: ast.Call) -> bool:
    is_waited_for = ast.unparse(call.func).startswith("subprocess.") or ast.unparse(call.func).endswith(".communicate")
    return is_waited_for and any(word.arg == "timeout" for word in call.keywords)


def programs_of(tree: ast.AST) -> set[str]:
    """Names of programs that a file starts or is given."""
    named: list[tuple[ast.AST | None, ast.AST | None]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[name], value=made) | ast.withitem(context_expr=made, optional_vars=name):
                named.append((name, made.func if isinstance(made, ast.Call) else None))
            case ast.arg(arg=word, annotation=kind):
                named.append((ast.Name(word), kind))
            case _:
                pass
    return {ast.unparse(name) for name, kind in named if name and kind and "Popen" in ast.unparse(kind)}


def test_no_test_waits_so_many_seconds_for_the_end_of_a_program() -> None:
    files = {file: ast.parse(file.read_text()) for file in TESTS.rglob("*.py")}
    found = {
        f"{file.relative_to(TESTS)}:{node.lineno}"
        for file, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "wait"
        if (node.args or node.keywords) and ast.unparse(node.func.value) in programs_of(tree)
    }
    assert not found, "use `status_of` of tests/waiting.py"


def test_a_program_that_does_not_end_fails_its_test() -> None:
    with subprocess.Popen(["sh", "-c", "exit 3"]) as process:
        assert waiting.status_of(process, 60.0) == 3
    with subprocess.Popen(["sleep", "600"]) as process:
        with pytest.raises(AssertionError, match="gave up waiting"):
            waiting.status_of(process, 0.1)
        process.kill()


def test_no_other_test_waits_for_a_program_by_the_clock() -> None:
    found = {
        f"{file.relative_to(TESTS)}:{node.lineno}"
        for file in TESTS.rglob("*.py")
        if "timeout=" in (text := file.read_text()) and file.name != "waiting.py"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and has_seconds_of_the_clock(node)
    }
    assert not found, "use `run_within` or `output_of` of tests/waiting.py"


@pytest.mark.parametrize(("share", "looks"), [(1.0, 5), (0.25, 20)])
def test_a_deadline_waits_longer_on_a_loaded_machine(share: float, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = 0.0, 0

    def condition() -> bool:
        nonlocal now, seen
        now, seen = now + 1.0, seen + 1
        return False

    monkeypatch.setattr(waiting, "share_of_a_core", lambda: share)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: None)
    with pytest.raises(AssertionError, match="gave up waiting"):
        waiting.eventually(condition, 5.0)
    assert seen == looks


def test_a_share_is_a_whole_core_or_less() -> None:
    assert 0.0 < waiting.share_of_a_core() <= 1.0


def test_a_command_is_run_to_its_end_or_killed() -> None:
    done = waiting.run_within(["sh", "-c", "sleep 0.3; echo said; echo warned >&2; exit 3"], 60.0)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "warned\n")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.run_within([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)
