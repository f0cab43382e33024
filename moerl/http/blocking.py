"""The client of `moerl.http.client` for threads that wait for their answers. Any process."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass

from moerl.http.client import HttpClient, Request, given_up
from moerl.processes.loop_thread import LoopThread


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
        self._loop = LoopThread("http")

    def ask(self, request: Request, max_bytes: int, seconds: float) -> WholeAnswer:
        """Returns the answer to one attempt.

        Args:
            max_bytes: the longest answer that can be one.
            seconds: from sending the request to the last byte of its answer.

        Raises:
            NoAnswerError: There is no answer, it is too long, or it does not end in time.
        """
        try:
            return self._loop.start(self._ask(request, max_bytes, seconds)).result()
        except CancelledError:
            raise given_up(request) from None

    async def _ask(self, request: Request, max_bytes: int, seconds: float) -> WholeAnswer:
        async with self._client.ask(request, seconds) as answer:
            return WholeAnswer(answer.status, await answer.read(max_bytes), answer.headers)

    def close(self) -> None:
        """Ends requests under way, which raise `NoAnswerError`, as those that come later do."""
        self._loop.close(self._client.close)
