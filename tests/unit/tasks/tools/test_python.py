"""Programs of a policy run in the sandbox: their output is read, and so is why they were stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moerl.errors import EpisodeError
from moerl.tasks.rewards.code import ProgramResult
from moerl.tasks.tools import python
from moerl.tasks.tools.loop import Tool, ToolCallError
from moerl.tasks.tools.python import PythonTool


def run(program: str, **limits: float) -> str:
    return asyncio.run(PythonTool(**{"seconds": 30.0, **limits}).call({"code": program}))  # type: ignore[arg-type]


def test_a_program_is_run_and_its_output_is_the_result() -> None:
    assert isinstance(PythonTool(), Tool)
    assert run("print(sum(range(101)))") == "5050\n"


def test_programs_of_one_answer_run_side_by_side_and_know_nothing_of_one_another(tmp_path: Path) -> None:
    async def both() -> list[str]:
        tool = PythonTool(seconds=30.0)
        code = "import os; open('left{}', 'w'); print(sorted(os.listdir()))"
        return await asyncio.gather(*(tool.call({"code": code.format(i)}) for i in range(2)))

    assert asyncio.run(both()) == ["['left0']\n", "['left1']\n"]


def test_a_program_that_takes_too_long_or_too_much_is_stopped_and_the_policy_reads_so() -> None:
    with pytest.raises(ToolCallError, match=r"^the program ran longer than 1 s\n?.*begun"):
        run("print('begun', flush=True)\nwhile True: pass", seconds=1.0)
    with pytest.raises(ToolCallError, match="the program took more than 256 MiB"):
        run("bytearray(1 << 33)", memory_bytes=1 << 28)


def test_a_program_that_wants_to_leave_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    for program in (
        f"print(open('{tmp_path}/secret').read())",
        "import socket; socket.socket()",
        "import os; os.fork()",
    ):
        with pytest.raises(ToolCallError, match=r"Permission denied|Operation not permitted"):
            run(program)


def test_an_error_of_a_program_is_read_with_what_it_printed() -> None:
    with pytest.raises(ToolCallError, match=r"^ZeroDivisionError: division by zero\nfirst\n$"):
        run("print('first')\n1 / 0")


def test_without_a_sandbox_the_episode_is_refused_and_the_policy_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*words: object) -> ProgramResult:
        raise RuntimeError("programs cannot be run safely on this machine: Landlock")

    monkeypatch.setattr(python, "run_program", refuses)
    with pytest.raises(EpisodeError, match="no program can be run"):
        run("print(1)")
