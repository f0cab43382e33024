"""Event loop in a thread of its own, for threads that wait for its work; threads for what blocks a loop. No torch."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

_NAME, _END_SECONDS = "in_thread", 5.0
"""Name of threads that the end of the process waits for; seconds in all."""


class LoopThread:
    """Event loop in a daemon thread, from construction until `close`. Any thread may call it.

    Nobody waits for ever: work is either refused or ended by `close`, whenever it was begun.

    Args:
        name: of the thread.

    Attributes:
        is_closed: True once `close` was called.
    """

    def __init__(self, name: str) -> None:
        self._lock, self.is_closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins `work` in the loop and returns what will hold its result; cancelled if the loop is closed, or is
        before the work ends."""
        with self._lock:
            if not self.is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        refused: Future[T] = Future()
        refused.cancel()
        refused.set_running_or_notify_cancel()
        return refused

    def call(self, function: Callable[..., object], *values: object) -> None:
        """Calls a function in the loop soon; never if the loop is closed."""
        with self._lock:
            if not self.is_closed:
                self._loop.call_soon_threadsafe(function, *values)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancels what is under way, runs `last` and ends the thread. Does nothing if it was called before.

        Raises what `last` raises, once the thread has ended."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                continue  # work raised it: whoever waits for that work gets it, too

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last()


async def in_thread[T](call: Callable[[], T]) -> T:
    """Runs code that blocks, in a thread of its own; returns its result or raises its error. Unlike with
    `asyncio.to_thread`, a call that hangs takes the place of no other; `run_in_daemon` says how the process ends."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the thread boundary: raised to whoever waits
            ends_more = isinstance(error, (CancelledError, StopIteration)) or not isinstance(error, Exception)
            result.set_exception(RuntimeError(repr(error)) if ends_more else error)

    run_in_daemon(run)
    return await asyncio.wrap_future(result)


def run_in_daemon(work: Callable[[], object]) -> None:
    """Runs code that may hang, in a daemon thread. The process waits for it at its end, for 5 s: a thread that comes
    back from C++ to an interpreter that has ended aborts the process, whatever its exit status was to be."""
    threading.Thread(target=work, name=_NAME, daemon=True).start()


@atexit.register
def _wait_for_them() -> None:
    until = time.monotonic() + _END_SECONDS
    for thread in [each for each in threading.enumerate() if each.name == _NAME]:
        thread.join(max(0.0, until - time.monotonic()))
