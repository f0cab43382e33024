"""An event loop in a thread: nobody waits for it for ever."""

from __future__ import annotations

import ast
import asyncio
import sys
import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest
from waiting import run_within

from moerl.processes.loop_thread import LoopThread, in_thread

ROOT = Path(__file__).resolve().parents[3]


async def nothing() -> None:
    """Ends at once."""


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_work_has_its_result_and_its_error():
    loop = LoopThread("test")

    async def fails() -> None:
        raise ValueError("seen")

    async def answer() -> int:
        return 42

    assert loop.start(answer()).result() == 42
    with pytest.raises(ValueError, match="seen"):
        loop.start(fails()).result()
    loop.close(nothing)


def test_closing_cancels_what_is_under_way_before_its_last_work():
    loop, order = LoopThread("test"), list[str]()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            order.append("work")

    async def last() -> None:
        order.append("last")

    begun = threading.Event()
    under_way = loop.start(work())
    loop.call(begun.set)
    assert begun.wait(20.0)
    loop.close(last)
    with pytest.raises(CancelledError):
        under_way.result(20.0)
    assert order == ["work", "last"]


def test_a_closed_loop_refuses_work_and_calls_nothing():
    loop, called = LoopThread("test"), list[int]()
    loop.close(nothing)
    loop.close(for_ever)  # does nothing
    loop.call(called.append, 1)
    with pytest.raises(CancelledError):
        loop.start(for_ever()).result(20.0)
    assert loop.is_closed
    assert called == []


def test_the_error_of_the_last_work_is_raised_and_the_thread_ends():
    loop = LoopThread("one of these tests")

    async def last() -> None:
        raise ValueError("seen")

    with pytest.raises(ValueError, match="seen"):
        loop.close(last)
    assert "one of these tests" not in {thread.name for thread in threading.enumerate()}


def test_work_that_begins_while_the_loop_is_closed_ends_whichever_comes_first():
    for _ in range(50):
        loop, futures = LoopThread("test"), list[Future[None]]()
        go = threading.Barrier(3)

        def start(loop: LoopThread = loop, futures: list[Future[None]] = futures, go: threading.Barrier = go) -> None:
            go.wait()
            futures.extend(loop.start(for_ever()) for _ in range(10))

        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        go.wait()
        loop.close(nothing)
        for thread in threads:
            thread.join()
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(20.0)


def test_work_that_raises_what_ends_a_process_ends_alone():
    loop = LoopThread("test")

    async def leaves() -> None:
        raise SystemExit(3)

    async def answer() -> int:
        return 42

    with pytest.raises(SystemExit):
        loop.start(leaves()).result(20.0)
    assert loop.start(answer()).result(20.0) == 42
    loop.close(nothing)


def test_no_other_module_begins_work_in_a_loop_of_another_thread():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moerl").rglob("*.py")
        if "run_coroutine_threadsafe" in path.read_text()
    }
    assert users == {"moerl/processes/loop_thread.py"}


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("seen"), ValueError),
        (CancelledError("seen"), RuntimeError),
        (StopIteration("seen"), RuntimeError),
        (SystemExit("seen"), RuntimeError),
    ],
)
def test_an_error_of_a_thread_neither_ends_nor_cancels_who_waits_for_it(
    raised: BaseException, seen: type[Exception]
) -> None:
    def fails() -> None:
        raise raised

    with pytest.raises(seen, match="seen"):
        asyncio.run(asyncio.wait_for(in_thread(fails), 60.0))


LEAVES = """
from datetime import timedelta
import torch.distributed as dist
from moerl.processes.loop_thread import run_in_daemon

run_in_daemon(lambda: dist.HashStore().wait(["never"], timedelta(seconds=0.3)))
raise SystemExit(75)
"""
"""The wait of a store is C++ without the interpreter, as the end of a process group is."""


def test_a_thread_that_comes_back_from_cpp_at_the_end_leaves_the_exit_status_as_it_is() -> None:
    ended = run_within([sys.executable, "-c", LEAVES], 120.0, cwd=ROOT)
    assert ended.returncode == 75, ended.stderr


HANGS = """
import time
from moerl.processes.loop_thread import run_in_daemon

run_in_daemon(lambda: time.sleep(3600))
"""


def test_a_thread_that_hangs_does_not_keep_the_process_from_its_end() -> None:
    assert run_within([sys.executable, "-c", HANGS], 120.0, cwd=ROOT).returncode == 0


def foreign_targets(file: Path) -> list[int]:
    """Lines with daemon threads that call what the file does not define."""
    tree = ast.parse(file.read_text())
    ours = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Thread")
        if any(word.arg == "daemon" for word in node.keywords)
        if not {ast.unparse(word.value).removeprefix("self.") for word in node.keywords if word.arg == "target"} & ours
    ]


def test_daemon_threads_of_others_code_are_waited_for_at_the_end() -> None:
    found = {file.name: lines for file in (ROOT / "moerl").rglob("*.py") if (lines := foreign_targets(file))}
    assert list(found) == ["loop_thread.py"], "use run_in_daemon"
    assert len(found["loop_thread.py"]) == 1
