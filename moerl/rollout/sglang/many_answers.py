"""Requests to one SGLang server. Those of one turn of the event loop go in one call, whose response has the answers of
all of them, each as soon as it is there: a call costs both sides a millisecond, a frame a tenth of it.

Runs in the engine's event loop. Frames: `srt/entrypoints/many_answers.py` in our patches of SGLang.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.errors import EngineError
from moerl.http.client import MAX_SAID_BYTES
from moerl.rollout.fleet.backend import TransportError
from moerl.rollout.sglang.http import SGLangHttp

PATH = "/generate_many"
HEAD = struct.Struct("<III")
"""Head of a frame: place of its request in the call, then status and bytes of content, as in an answer to the request
alone."""

_MOST_TOGETHER = 64
"""Requests of one call: more would gain nothing, and are lost together if their connection is."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request. answer: status and content."""

    body: Mapping[str, Any]
    max_bytes: int
    answer: asyncio.Future[tuple[int, bytes]]


class ManyAnswers:
    """Requests over the connections of `http`. seconds: longest time from asking for an answer to having it."""

    def __init__(self, http: SGLangHttp, seconds: float) -> None:
        self._http, self._seconds = http, seconds
        self._next: list[_Asked] = []
        self._calls: dict[_Asked, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    async def ask(self, body: Mapping[str, Any], max_bytes: int) -> bytes:
        """Asks for a compact answer and returns it; the `rid` of the request is nobody else's.

        If this is cancelled, the server is told that nobody waits any more.

        Args:
            max_bytes: the longest answer that can be one to this body.

        Raises:
            TransportError: there is no whole answer; another attempt may succeed.
            EngineError: the server refused the request.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(body, max_bytes, loop.create_future())
        if not self._next or len(self._next) == _MOST_TOGETHER:
            self._next = []
            loop.call_soon(self._send, self._next)
        self._next.append(asked)
        try:
            async with asyncio.timeout(self._seconds):
                status, content = await asked.answer
        except TimeoutError as error:
            raise self._http.out_of_time(PATH, self._seconds) from error
        finally:
            if asked.answer.cancelled():
                # Later: if the others of its call are cancelled too, the call is ended instead.
                loop.call_soon(self._leave, asked)
        self._http.check_status(PATH, status, content)
        return content

    async def close(self) -> None:
        """Cancels all calls; the requests under way in them fail."""
        tasks = {*self._calls.values(), *self._aborts}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send(self, asks: list[_Asked]) -> None:
        if self._next is asks:
            self._next = []
        asks = [asked for asked in asks if not asked.answer.done()]
        if not asks:
            return
        call = asyncio.create_task(self._call(asks))
        self._calls |= dict.fromkeys(asks, call)
        call.add_done_callback(lambda done: self._ended(asks, done))

    async def _call(self, asks: Sequence[_Asked]) -> None:
        frames = Frames([asked.max_bytes for asked in asks])

        def take(piece: bytes) -> None:
            for place, status, content in frames.read(piece):
                if not asks[place].answer.done():
                    asks[place].answer.set_result((status, content))

        await self._http.post_stream(PATH, [asked.body for asked in asks], take)

    def _ended(self, asks: Sequence[_Asked], call: asyncio.Task[None]) -> None:
        error = self._http.given_up(PATH) if call.cancelled() else call.exception()
        for asked in asks:
            del self._calls[asked]
            if not asked.answer.done():
                missing = TransportError(f"SGLang {PATH}: no answer", seen="the end of the response")
                asked.answer.set_exception(error or missing)

    def _leave(self, asked: _Asked) -> None:
        """Aborts a request whose answer nobody waits for any more."""
        call = self._calls.get(asked)
        if call is None:
            return
        if all(other.answer.done() for other, its_call in self._calls.items() if its_call is call):
            call.cancel()  # a server aborts what was asked over a connection that closes
            return
        task = asyncio.create_task(self._abort(asked))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, asked: _Asked) -> None:
        # A server that this fails on is found out by other calls: it answers what nobody reads, until it is done.
        with contextlib.suppress(EngineError):
            await self._http.admin("/abort_request", {"rid": asked.body["rid"]})


class Frames:
    """The response to a call, cut into frames.

    Args:
        max_bytes: of the answer to each request of the call.
    """

    def __init__(self, max_bytes: Sequence[int]) -> None:
        self._max_bytes = dict(enumerate(max_bytes))
        self._rest = bytearray()

    def read(self, piece: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yields place, status and content of every frame that `piece` completes.

        Raises:
            TransportError: a frame answers nothing that was asked, answers again, or is too long.
        """
        self._rest += piece
        while len(self._rest) >= HEAD.size:
            place, status, num_bytes = HEAD.unpack_from(self._rest)
            self._check(place, status, num_bytes)
            end = HEAD.size + num_bytes
            if len(self._rest) < end:
                return
            content = bytes(memoryview(self._rest)[HEAD.size : end])
            del self._rest[:end], self._max_bytes[place]
            yield place, status, content

    def _check(self, place: int, status: int, num_bytes: int) -> None:
        limit = self._max_bytes.get(place)
        if limit is None:
            raise TransportError(
                f"SGLang {PATH}: an answer to nothing",
                seen=f"place {place}",
                expected=f"one of {len(self._max_bytes)} places without an answer",
            )
        limit = limit if status == 200 else MAX_SAID_BYTES
        if num_bytes > limit:
            raise TransportError(
                f"SGLang {PATH}: the answer is too long",
                seen=f"{num_bytes} bytes, status {status}",
                expected=f"no more than the {limit} bytes that what was asked for takes",
                remedy="look at the server's log",
            )
