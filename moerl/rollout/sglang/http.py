"""HTTP to one SGLang server: keys, deadlines, bounded answers, and retries where a call may be repeated.

The one client of a server in a process; runs in the event loop of the engine or of a sender. A generation may be
repeated: it has no effect but its answer, and the engine gives every attempt an id of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from moerl.errors import ContractError, EngineError
from moerl.rollout.fleet.backend import KeyRefusedError, TransportError
from moerl.rollout.fleet.backoff import NUM_ATTEMPTS, backoff
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.sglang.reading import AS_IT_IS, MAX_FACTS_BYTES, MAX_SAID_BYTES, pieces, read

_JSON_OBJECT = msgspec.json.Decoder(dict[str, Any])
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0
"""How long a connection that nobody uses is kept: less than the 5 s after which servers close it, perhaps under a
request that has just been sent."""


class SGLangHttp:
    """Connections to one server, reused between calls."""

    def __init__(self, endpoint: Endpoint, *, max_connections: int, timeout_seconds: float) -> None:
        """max_connections: for requests under way together. timeout_seconds: of one call, from sending it to the last
        byte of its answer."""
        self.endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        # Beside requests: their aborts, a probe, a step of a weight update.
        self._num_connections = max_connections + 4
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    def _connections(self) -> aiohttp.ClientSession:
        # Made with the first call: a session belongs to the event loop that it is made in.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._num_connections, keepalive_timeout=_IDLE_SECONDS),
                headers=AS_IT_IS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                auto_decompress=False,
                # Server addresses are the caller's own: proxies of the environment have no business here.
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object behind `path`; repeated where it may help.

        Raises:
            EngineError: the server refused the call, or did not answer any attempt.
        """
        return await self._repeated("GET", path, None, admin=False)

    async def get_once(self, path: str) -> dict[str, Any]:
        """One attempt of `get`.

        Raises:
            EngineError: as `get`.
        """
        return decoded(path, await self._call("GET", path, None, MAX_FACTS_BYTES), _JSON_OBJECT.decode)

    async def admin(self, path: str, body: Mapping[str, Any]) -> None:
        """A call that only the controller may make; its answer is not looked at. Repeated: use for calls that may be.

        Raises:
            EngineError: as `get`.
        """
        await self._repeated("POST", path, body, admin=True)

    async def post_once(
        self,
        path: str,
        body: Mapping[str, Any],
        max_bytes: int,
        timeout_seconds: float | None = None,
        *,
        admin: bool = False,
    ) -> bytes:
        """One attempt of a call whose answer is the caller's to decode.

        Args:
            max_bytes: the longest answer that can be one to this body.
            timeout_seconds: where it is another than for all calls.
            admin: only the controller may make it.

        Raises:
            TransportError: another attempt may succeed.
            EngineError: the server refused the call.
        """
        return await self._call("POST", path, body, max_bytes, admin=admin, timeout_seconds=timeout_seconds)

    async def post_stream(self, path: str, bodies: Sequence[Mapping[str, Any]], take: Callable[[bytes], None]) -> None:
        """One attempt of a call for many answers, which are the caller's to bound and to decode, and whose time is the
        caller's to limit.

        Args:
            take: gets the answers, piece by piece as they come; what it raises ends the call.

        Raises:
            TransportError: another attempt may succeed.
            EngineError: the server refused the call.
        """
        async with self._response("POST", path, bodies, admin=False, seconds=None) as response:
            if response.status != 200:
                check_status(path, response.status, await read(path, response, MAX_SAID_BYTES))
            async for piece in pieces(path, response):
                take(piece)

    async def _repeated(self, method: str, path: str, body: Mapping[str, Any] | None, *, admin: bool) -> dict[str, Any]:
        for attempt in range(NUM_ATTEMPTS):
            try:
                limit = MAX_SAID_BYTES if admin else MAX_FACTS_BYTES
                content = await self._call(method, path, body, limit, admin=admin)
                return {} if admin else decoded(path, content, _JSON_OBJECT.decode)
            except TransportError:
                if attempt + 1 == NUM_ATTEMPTS:
                    raise
                await backoff(attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        max_bytes: int,
        *,
        admin: bool = False,
        timeout_seconds: float | None = None,
    ) -> bytes:
        seconds = timeout_seconds or self._timeout_seconds
        async with self._response(method, path, body, admin=admin, seconds=seconds) as response:
            content = await read(path, response, max_bytes)
            check_status(path, response.status, content)
            return content

    @contextlib.asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Any, *, admin: bool, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """seconds: until its end; None where the caller sees to it."""
        if self._is_closed:
            raise self.given_up(path)
        key = self.endpoint.admin_key if admin else self.endpoint.api_key
        headers = {"Authorization": f"Bearer {key}"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
        call = self._connections().request(
            method, self.endpoint.url + path, data=data, headers=headers, allow_redirects=False
        )
        try:
            async with asyncio.timeout(seconds), call as response:
                yield response
        except asyncio.CancelledError as error:
            # A session that is closed cancels calls that wait for a connection; their tasks were not cancelled.
            task = asyncio.current_task()
            if not self._is_closed or task is None or task.cancelling():
                raise
            raise self.given_up(path) from error
        except aiohttp.ClientError as error:
            raise TransportError(
                f"SGLang {path}: the connection failed",
                seen=f"{self.endpoint.url}: {type(error).__name__}: {error}",
                remedy="look at the server's log; is it still running?",
            ) from error
        except TimeoutError as error:
            raise self.out_of_time(path, seconds or _CONNECT_SECONDS) from error

    def out_of_time(self, path: str, seconds: float) -> TransportError:
        return TransportError(
            f"SGLang {path}: no answer in time",
            seen=self.endpoint.url,
            expected=f"an answer within {seconds} s",
            remedy="look at the server's log",
        )

    def given_up(self, path: str) -> TransportError:
        return TransportError(f"SGLang {path}: the server was given up", seen=self.endpoint.url)


def check_status(path: str, status: int, content: bytes) -> None:
    """Raises KeyRefusedError, TransportError or EngineError where an answer says that there is none."""
    if status == 200:
        return
    said = content[:500].decode(errors="replace")
    if status == 401:
        raise KeyRefusedError(
            f"SGLang {path}: the server does not know our key",
            seen="status 401",
            expected="the key that the server was started with",
            remedy="point to the server file of the server that runs now",
        )
    kind = TransportError if status == 429 or status >= 500 else EngineError
    raise kind(f"SGLang {path}: refused", seen=f"status {status}: {said}", expected="status 200")


def decoded[T](path: str, content: bytes, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of an answer.

    Raises:
        TransportError: nothing.
    """
    try:
        return decode(content)
    except (msgspec.MsgspecError, ContractError, ValueError, RecursionError) as error:
        raise TransportError(
            f"SGLang {path}: unreadable", seen=f"{content[:200]} ({error})", expected="one whole object"
        ) from error
