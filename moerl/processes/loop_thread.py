"""Event loop in a thread of its own, for threads that wait for its work; threads for what blocks a loop. No torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any


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
    `asyncio.to_thread`, a call that hangs neither takes the place of others nor keeps the process from its end."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            finish = partial(result.set_result, call())
        except Exception as error:  # noqa: BLE001 - the thread boundary: raised to whoever waits
            finish = partial(result.set_exception, error)
        except BaseException as error:  # noqa: BLE001 - nor may it end the loop
            finish = partial(result.set_exception, RuntimeError(repr(error)))
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if result.done() else finish())

    threading.Thread(target=run, name="in_thread", daemon=True).start()
    return await result
