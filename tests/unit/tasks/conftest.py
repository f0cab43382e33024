"""Reward functions of every kind, and processes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scored_process import ScoredProcess

MODULE = """
import asyncio, os, pathlib, subprocess, sys, time

state = {"calls": 0}

def behave(row, response):
    state["calls"] += 1
    if response == "hang":
        time.sleep(3600)
    if response == "start a process":
        return subprocess.Popen(["sleep", "3600"]).pid
    if response == "crash":
        os._exit(7)
    if response == "exit":
        sys.exit(3)
    if response == "print":
        print("not a reply")
        os.write(1, b"{}\\n")
    if response == "print and hang":
        print("calculating", flush=True)
        time.sleep(3600)
    if response == "read":
        return len(sys.stdin.read())
    if response == "count":
        return state["calls"]
    if response == "pid":
        return os.getpid()
    return row["value"]

def none():
    return 1.0

async def later(row, response):
    # Returns only once all calls of a batch are under way.
    state["calls"] += 1
    while state["calls"] < row["calls"]:
        await asyncio.sleep(0.001)
    if response == "raise":
        raise KeyError("no such dish")
    return float(response)

def batch(rows, responses):
    if responses[0] == "short":
        return [1.0]
    return [{"reward": float(row["value"]), "together": len(rows)} for row in rows]

def killed(row, response):
    # A file for each call. The first `times` calls end in the middle.
    folder = pathlib.Path(row["folder"])
    number = len(list(folder.glob("call-*")))
    (folder / f"call-{number}").touch()
    if number < row["times"]:
        if row["whom"] == "nobody":
            os._exit(7)
        os.kill(os.getpid() if row["whom"] == "worker" else os.getppid(), 9)
        time.sleep(3600)
    return 1.0

def out_of_memory_score(row, response):
    return int(pathlib.Path("/proc/self/oom_score_adj").read_text())

def deep(row, response, depth=200):
    if depth == 0:
        time.sleep(3600)
    return deep(row, response, depth - 1)

def returns(row, response):
    return eval(response)

not_a_function = 3
"""

Start = Callable[..., ScoredProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    (tmp_path / "breaks_at_import.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "dies_at_import.py").write_text("import os\nos._exit(9)\n")
    started: list[ScoredProcess] = []

    def begin(
        function: str = "odd_rewards:behave", timeout_seconds: float = 60.0, memory_bytes: int = 1 << 32, **more: Any
    ) -> ScoredProcess:
        started.append(ScoredProcess(function, timeout_seconds, memory_bytes, **more))
        return started[-1]

    yield begin
    for process in started:
        process.close()
