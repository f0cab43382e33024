"""The client of `moerl.http.client` for threads that wait for their answers. Any process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass

from moerl.http.client import HttpClient, Request, given_up


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer to its last byte."""

    status: int
    """HTTP status."""
    content: bytes
    """Body as it came; of a status other than 200 only its beginning."""
    headers: Mapping[str, str]
    """By name, in capitals or small letters; the texts may be anything, the request's key, too."""


class BlockingClient:
    """Connections to an address, for several threads. The event loop runs in a thread of its own until `close`.

    Args:
        max_connections, uses_proxies: As of `HttpClient`.
    """

    def __init__(self, *, max_connections: int, uses_proxies: bool = False) -> None:
        self._client = HttpClient(max_connections=max_connections, uses_proxies=uses_proxies)
        self._lock, self._is_closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def ask(self, request: Request, max_bytes: int, seconds: float) -> WholeAnswer:
        """Returns the answer to one attempt.

        Args:
            max_bytes: the longest answer that can be one.
            seconds: from sending the request to the last byte of its answer.

        Raises:
            NoAnswerError: There is no answer, it is too long, or it does not end in time.
        """
        with self._lock:
            if self._is_closed:
                raise given_up(request)
            answer = asyncio.run_coroutine_threadsafe(self._ask(request, max_bytes, seconds), self._loop)
        try:
            return answer.result()
        except CancelledError:
            raise given_up(request) from None

    async def _ask(self, request: Request, max_bytes: int, seconds: float) -> WholeAnswer:
        async with self._client.ask(request, seconds) as answer:
            return WholeAnswer(answer.status, await answer.read(max_bytes), answer.headers)

    def close(self) -> None:
        """Ends requests under way, which raise `NoAnswerError`, as those that come later do."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
