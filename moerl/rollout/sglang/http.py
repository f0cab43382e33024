"""HTTP to one SGLang server: keys, deadlines, and retries of calls that may be repeated.

The one client of a server in a process; runs in the event loop of the engine or of a sender. A generation may be
repeated: it has no effect but its answer, and the engine gives every attempt an id of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from moerl.errors import EngineError
from moerl.http import client
from moerl.http.client import MAX_SAID_BYTES, HttpAnswer, HttpClient, NoAnswerError, Request
from moerl.http.keys import Key
from moerl.rollout.fleet.backend import KeyRefusedError, TransportError
from moerl.rollout.fleet.backoff import NUM_ATTEMPTS, backoff
from moerl.rollout.fleet.endpoint import Endpoint

MAX_FACTS_BYTES = 1 << 22
"""Bytes of the longest answer about a server: `/server_info` takes 36 KB, and 20 KB more per data-parallel rank."""

_JSON_OBJECT = msgspec.json.Decoder(dict[str, Any])


class SGLangHttp:
    """Connections to one server, reused between calls."""

    def __init__(self, endpoint: Endpoint, *, max_connections: int, timeout_seconds: float) -> None:
        """Connects to nothing yet.

        Args:
            max_connections: for requests under way together.
            timeout_seconds: of one call, from sending it to the last byte of its answer.
        """
        self.endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._key, self._admin_key = (Key(key) if key else None for key in (endpoint.api_key, endpoint.admin_key))
        # Next to requests: their aborts, a probe, a step of a weight update.
        self._client = HttpClient(max_connections=max_connections + 4)

    async def close(self) -> None:
        await self._client.close()

    async def get(self, path: str) -> dict[str, Any]:
        """Returns the JSON object behind `path`; asks again if that may help.

        Raises:
            EngineError: the server refused the call, or did not answer any attempt.
        """
        return await _repeated(lambda: self.get_once(path))

    async def get_once(self, path: str) -> dict[str, Any]:
        """Makes one attempt of `get`.

        Raises:
            EngineError: as `get`.
        """
        return decoded(path, await self.call_once(path, None, MAX_FACTS_BYTES), _JSON_OBJECT.decode)

    async def admin(self, path: str, body: Mapping[str, Any]) -> None:
        """Makes a call with the admin key; its answer is not looked at. Repeated: use for calls that may be.

        Raises:
            EngineError: as `get`.
        """
        await _repeated(lambda: self.call_once(path, body, MAX_SAID_BYTES, admin=True))

    async def call_once(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        max_bytes: int,
        timeout_seconds: float | None = None,
        *,
        admin: bool = False,
    ) -> bytes:
        """Makes one attempt of a call whose answer is the caller's to decode.

        Args:
            body: None for GET, else of a POST.
            max_bytes: the longest answer that can be one to this body.
            timeout_seconds: of this call; None for that of all calls.
            admin: with the admin key.

        Raises:
            TransportError: another attempt may succeed.
            EngineError: the server refused the call.
        """
        seconds = timeout_seconds or self._timeout_seconds
        async with self._answer(path, body, admin=admin, seconds=seconds) as answer:
            content = await answer.read(max_bytes)
            self.check_status(path, answer.status, content)
            return content

    async def post_stream(self, path: str, bodies: Sequence[Mapping[str, Any]], take: Callable[[bytes], None]) -> None:
        """Makes one attempt of a call for many answers, which are the caller's to bound and to decode, and whose time
        the caller limits.

        Args:
            take: gets the answers, piece by piece as they come; what it raises ends the call.

        Raises:
            TransportError: another attempt may succeed.
            EngineError: the server refused the call.
        """
        async with self._answer(path, bodies, admin=False, seconds=None) as answer:
            if answer.status != 200:
                self.check_status(path, answer.status, await answer.read(MAX_SAID_BYTES))
            async for piece in answer.pieces():
                take(piece)

    @contextlib.asynccontextmanager
    async def _answer(self, path: str, body: Any, *, admin: bool, seconds: float | None) -> AsyncIterator[HttpAnswer]:
        """Sends a request; yields the answer as it begins. seconds: until its end; None if the caller limits the
        time."""
        method, content = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        key = self._admin_key if admin else self._key
        with _transport(path):
            async with self._client.ask(Request(method, self.endpoint.url + path, content, key), seconds) as answer:
                yield answer

    def check_status(self, path: str, status: int, content: bytes) -> None:
        """Raises KeyRefusedError, TransportError or EngineError unless the status of an answer is 200."""
        if status == 200:
            return
        if status == 401:
            raise KeyRefusedError(
                f"SGLang {path}: the server does not know our key",
                seen="status 401",
                expected="the key that the server was started with",
                remedy="point to the server file of the server that runs now",
            )
        said = client.excerpt_of(content, self._key, self._admin_key)
        kind = TransportError if status == 429 or status >= 500 else EngineError
        raise kind(f"SGLang {path}: refused", seen=f"status {status}: {said}", expected="status 200")

    def out_of_time(self, path: str, seconds: float) -> TransportError:
        """Returns the error of a call that has no answer in time."""
        return _as_transport(path, client.no_time(self.endpoint.url, seconds))

    def given_up(self, path: str) -> TransportError:
        """Returns the error of a call that was under way when this was closed."""
        return TransportError(f"SGLang {path}: the server was given up", seen=self.endpoint.url)


def decoded[T](path: str, content: bytes, decode: Callable[[bytes], T]) -> T:
    """Returns what `decode` makes of an answer.

    Raises:
        TransportError: the answer cannot be decoded.
    """
    with _transport(path):
        return client.decoded(content, decode)


async def _repeated[T](call: Callable[[], Awaitable[T]]) -> T:
    """Makes a call again, after a pause, until an attempt succeeds or all have failed."""
    for attempt in range(NUM_ATTEMPTS - 1):
        with contextlib.suppress(TransportError):
            return await call()
        await backoff(attempt)
    return await call()


@contextlib.contextmanager
def _transport(path: str) -> Iterator[None]:
    try:
        yield
    except NoAnswerError as error:
        raise _as_transport(path, error) from error


def _as_transport(path: str, error: NoAnswerError) -> TransportError:
    return TransportError(f"SGLang {path}: {error.what}", seen=error.seen, expected=error.expected, remedy=error.remedy)
