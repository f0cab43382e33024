"""An event loop in a thread: nobody waits for it for ever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

from moerl.processes.loop_thread import LoopThread

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
