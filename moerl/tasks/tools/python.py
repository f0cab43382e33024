"""A tool that runs programs of the policy, in the sandbox of rewards. Runs in threads of the controller."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from moerl.contract.episodes import in_thread
from moerl.errors import EpisodeError
from moerl.tasks.rewards.code import ProgramResult, run_program
from moerl.tasks.tools.loop import ToolCallError, tool_schema


class PythonTool:
    """Runs Python as `kind: code` does ([docs](docs/tasks.md#programs-in-a-sandbox)): each program in an empty folder
    of its own, which is removed. The policy reads the standard output, or how a program failed and what it printed.

    Programs run side by side in as many processes as there are cores; further ones wait. A call that an episode gives
    up ends at its time limit.

    Args:
        seconds: wall-clock time of a program.
        memory_bytes: memory of its process.
    """

    def __init__(self, *, seconds: float = 5.0, memory_bytes: int = 1 << 30) -> None:
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._free = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        code = {"type": "string", "description": "The program."}
        about = "Runs a Python program and returns what it prints. Each program starts anew."
        limits = {"required": ["code"], "additionalProperties": False}
        self.schema = tool_schema("python", about, {"type": "object", "properties": {"code": code}, **limits})

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns what a program printed.

        Raises:
            ToolCallError: the program failed, ran too long, took too much memory or did what is forbidden.
            EpisodeError: there is no sandbox on this machine.
        """
        ended = await in_thread(lambda: self._run(str(arguments["code"])))
        if ended.outcome == "passed":
            return ended.output
        why = {
            "timeout": f"the program ran longer than {self._seconds:g} s",
            "memory": f"the program took more than {self._memory_bytes >> 20} MiB",
        }.get(ended.outcome, ended.said or "the program ended by itself")
        raise ToolCallError("\n".join(filter(None, (why.strip(), ended.output))))

    def _run(self, program: str) -> ProgramResult:
        with self._free:
            try:
                return run_program(program, "", self._seconds, self._memory_bytes)
            except RuntimeError as error:
                raise EpisodeError(
                    "the tool python: no program can be run",
                    seen=str(error),
                    expected="a sandbox: Linux 5.13 with Landlock, on x86-64 or ARM64",
                    remedy="run on such a machine, or leave the tool away",
                ) from error
