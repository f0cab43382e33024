"""HTTP to one SGLang server: keys, deadlines, bounded answers, and retries where a call may be repeated.

The one client of a server in a process; runs in the event loop of the engine or of a sender. A generation may be
repeated: it has no effect but its answer, and the engine gives every attempt an id of its own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import msgspec

from moerl.errors import ContractError, EngineError
from moerl.rollout.fleet.backend import KeyRefusedError, TransportError
from moerl.rollout.fleet.backoff import NUM_ATTEMPTS, backoff
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.sglang.reading import AS_IT_IS, MAX_FACTS_BYTES, MAX_SAID_BYTES, read

_JSON_OBJECT = msgspec.json.Decoder(dict[str, Any])
_POOL_SIZE = 8
"""Connections of each pool."""


class _Pool:
    """Up to `_POOL_SIZE` connections. num_under_way: requests that have them, or wait for one."""

    def __init__(self, context: ssl.SSLContext) -> None:
        limits = httpx.Limits(max_connections=_POOL_SIZE, max_keepalive_connections=_POOL_SIZE)
        self.transport = httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits)
        self.num_under_way = 0


class _Answer(httpx.AsyncByteStream):
    """The body of an answer; its request is under way until it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, pool: _Pool) -> None:
        self._body, self._pool = body, pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._body.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            self._pool.num_under_way -= 1


class _SmallPools(httpx.AsyncBaseTransport):
    """Connections in pools of a few. A pool looks at each of its connections, a system call or two, whenever a request
    begins or ends: with hundreds in one pool that takes longer than all else that a client does.

    The first pool with room takes a request. Connections that are there already are in the first pools, so that
    requests reach the server in their order.
    """

    def __init__(self, num_connections: int) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        self._pools = [_Pool(context) for _ in range(-(-num_connections // _POOL_SIZE))]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = min(self._pools, key=lambda pool: max(0, pool.num_under_way + 1 - _POOL_SIZE))
        pool.num_under_way += 1
        try:
            response = await pool.transport.handle_async_request(request)
        except BaseException:  # cancelled, too
            pool.num_under_way -= 1
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Answer(response.stream, pool)
        return response

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.transport.aclose()


class SGLangHttp:
    """Connections to one server, reused between calls."""

    def __init__(self, endpoint: Endpoint, *, max_connections: int, timeout_seconds: float) -> None:
        """max_connections: for requests under way together. timeout_seconds: of one call, from sending it to the last
        byte of its answer."""
        self.endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        # Beside requests: their aborts, a probe, a step of a weight update.
        num_connections = max_connections + 4
        # Server addresses are the caller's own: proxies of the environment have no business here.
        self._client = httpx.AsyncClient(
            base_url=endpoint.url,
            headers=AS_IT_IS,
            transport=_SmallPools(num_connections),
            timeout=httpx.Timeout(None, connect=10.0),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

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
        if self._client.is_closed:
            raise TransportError(f"SGLang {path}: the server was given up", seen=self.endpoint.url)
        seconds = timeout_seconds or self._timeout_seconds
        key = self.endpoint.admin_key if admin else self.endpoint.api_key
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with asyncio.timeout(seconds):
                async with self._client.stream(method, path, json=body, headers=headers) as response:
                    content = await read(path, response, max_bytes)
                    _check_status(path, response.status_code, content)
                    return content
        except TimeoutError as error:
            raise TransportError(
                f"SGLang {path}: no answer in time",
                seen=self.endpoint.url,
                expected=f"an answer within {seconds} s",
                remedy="look at the server's log",
            ) from error
        except httpx.HTTPError as error:
            raise TransportError(
                f"SGLang {path}: the connection failed",
                seen=f"{self.endpoint.url}: {type(error).__name__}: {error}",
                remedy="look at the server's log; is it still running?",
            ) from error


def _check_status(path: str, status: int, content: bytes) -> None:
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
