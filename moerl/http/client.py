"""Answers over HTTP, as they came over the wire: the one reader of them. Any process; runs in the caller's event loop,
or with a `BlockingClient` in a thread of its own.

Whoever answers is not trusted. A compressed answer would pass every limit, as 131 KB of zstd make 4 GiB: we ask for
none, refuse one before its first byte is looked at, and never expand any. Bytes, time and headers are limited, no
redirect is followed, no cookie is kept, and no error shows the key of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache
from typing import Self, TypedDict
from urllib.parse import urlsplit

import aiohttp
import certifi
import msgspec
from yarl import URL

from moerl.errors import MoerlError
from moerl.http.keys import Key
from moerl.processes.loop_thread import LoopThread
from moerl.telemetry.terminal import excerpt

MAX_SAID_BYTES = 1 << 16
"""Largest answer that only confirms a request, and the part of an error's body that is kept."""

_EXCERPT_BYTES = 4096
"""Bytes of a body that may be shown; only these are searched for the key."""

_AS_IT_IS = {"Accept-Encoding": "identity"}
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0
"""Longest time that an idle connection is kept: less than the 5 s after which servers close it, perhaps under a request
that has just been sent."""

_MAX_HEADER_BYTES = 8190
"""Longest first line, header and trailer. There are at most 128 headers."""


class _Proxy(TypedDict, total=False):
    """Arguments of a request that goes through a proxy."""

    proxy: URL
    proxy_auth: aiohttp.BasicAuth | None


class NoAnswerError(MoerlError):
    """A request without a whole, readable answer. Another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an address."""

    method: str
    """HTTP method, in capitals."""
    url: str
    """Absolute address, http or https."""
    body: bytes | None = None
    """JSON; None for a request without a body."""
    key: Key | None = None
    """Key for the header; None for an address that asks for none."""

    def hide(self, text: str) -> str:
        """Returns the text without the key."""
        return text if self.key is None else self.key.hide(text)


class HttpAnswer:
    """The answer to a request, which comes piece by piece.

    Attributes:
        status: HTTP status.
        headers: by name, in capitals or small letters; the texts may be anything, the request's key, too.
    """

    def __init__(self, request: Request, response: aiohttp.ClientResponse) -> None:
        self._request, self._response = request, response
        self.status, self.headers = response.status, response.headers

    async def read(self, max_bytes: int) -> bytes:
        """Returns the body; if the status is not 200, only its first `MAX_SAID_BYTES` and a little more.

        Raises:
            NoAnswerError: As `pieces`, or the body is longer than `max_bytes`.
        """
        # One buffer: of pieces of one byte each, a list would take forty times as much.
        content = bytearray()
        async for piece in self.pieces():
            content += piece
            if self.status != 200:
                if len(content) >= MAX_SAID_BYTES:
                    break
            elif len(content) > max_bytes:
                raise NoAnswerError(
                    "the answer is too long",
                    seen=f"more than {max_bytes:,} bytes",
                    expected="no more than what was asked for takes",
                    remedy="look at the server's log",
                )
        return bytes(content)

    def pieces(self) -> AsyncIterator[bytes]:
        """Returns the body as it comes.

        Raises:
            NoAnswerError: The body is encoded.
        """
        encoding = ", ".join(self._response.headers.getall("Content-Encoding", ["identity"]))
        if encoding.lower() != "identity":
            raise NoAnswerError(
                "the answer is encoded",
                seen=f"Content-Encoding: {self._request.hide(encoding)[:100]}",
                expected="the answer as it is",
                remedy="reach the server directly, without a proxy that compresses",
            )
        return self._response.content.iter_any()


class HttpClient:
    """Connections to an address, reused between requests. Belongs to the event loop that asks first.

    Args:
        max_connections: most requests under way together; further ones wait for a connection.
        uses_proxies: requests go through the proxies that the environment names (`HTTPS_PROXY`, `NO_PROXY`).
    """

    def __init__(self, *, max_connections: int, uses_proxies: bool = False) -> None:
        self._max_connections, self._uses_proxies = max_connections, uses_proxies
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends requests under way, which raise `NoAnswerError`, as those that come later do."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    @contextlib.asynccontextmanager
    async def ask(self, request: Request, seconds: float | None) -> AsyncIterator[HttpAnswer]:
        """Yields the answer to one attempt.

        Args:
            seconds: from the call to the last byte of the answer, with the wait for a connection; None if the caller
                sets the limit.

        Raises:
            NoAnswerError: There is no answer, or it does not end in time.
        """
        if self._is_closed:
            raise given_up(request)
        try:
            async with asyncio.timeout(seconds), await self._sent(request) as response:
                yield HttpAnswer(request, response)
        except asyncio.CancelledError:
            # A session that is closed cancels requests that wait for a connection; their tasks were not cancelled.
            task = asyncio.current_task()
            if not self._is_closed or task is None or task.cancelling():
                raise
            raise given_up(request) from None
        except aiohttp.ClientError as error:
            # Its text may have the key, so it must not be shown as the cause.
            raise NoAnswerError(
                "the connection failed",
                seen=request.hide(f"{request.url}: {type(error).__name__}: {error}"[:2000]),
                remedy="look at the server's log; is it still running?",
            ) from None
        except TimeoutError:
            raise no_time(request.url, seconds or _CONNECT_SECONDS) from None

    async def _sent(self, request: Request) -> aiohttp.ClientResponse:
        """Sends the request and returns the answer once its headers have come."""
        headers = dict(request.key.headers) if request.key is not None else {}
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        proxy = _proxy(request.url) if self._uses_proxies else _Proxy()
        try:
            return await self._connections().request(
                request.method,
                request.url,
                data=request.body,
                headers=headers,
                allow_redirects=False,
                ssl=_trusted() if request.url.startswith("https:") else True,
                **proxy,
            )
        except UnicodeError as error:
            raise NoAnswerError(
                "no such address", seen=f"{request.url}: {error}", expected="a host name", remedy="check the address"
            ) from error

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_IDLE_SECONDS),
                headers=_AS_IT_IS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                auto_decompress=False,
                # Nothing of ~/.netrc, and proxies only if they are asked for.
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=_MAX_HEADER_BYTES,
                max_field_size=_MAX_HEADER_BYTES,
            )
        return self._session


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
    """Connections to an address, for several threads, which wait for their answers. The event loop runs in
    a thread of its own until `close`.

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
            seconds: from the call to the last byte of the answer, with the wait for a connection.

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


def decoded[T](content: bytes, decode: Callable[[bytes], T]) -> T:
    """Returns what `decode` makes of an answer.

    Raises:
        NoAnswerError: The answer is something else, or nested deeper than the interpreter's stack allows.
    """
    try:
        return decode(content)
    except (msgspec.MsgspecError, MoerlError, ValueError, RecursionError) as error:
        raise NoAnswerError("unreadable", seen=f"{len(content)} bytes: {error}", expected="one whole object") from None


def excerpt_of(content: bytes, *keys: Key | None) -> str:
    """Returns the first words of a body without any of the keys, for a message."""
    said = content[:_EXCERPT_BYTES].decode(errors="replace")
    for key in keys:
        said = said if key is None else key.hide(said)
    return excerpt(said)


def no_time(url: str, seconds: float) -> NoAnswerError:
    """Returns the error of an answer that does not end in time."""
    return NoAnswerError(
        "no answer in time", seen=url, expected=f"an answer within {seconds:g} s", remedy="look at the server's log"
    )


def given_up(request: Request) -> NoAnswerError:
    """Returns the error of a request that a closed client was asked for, or had under way."""
    return NoAnswerError("given up, as the client was closed", seen=request.url)


def _proxy(url: str) -> _Proxy:
    """Returns the proxy that the environment names for an address, the password in a separate value."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return {}
    named = urllib.request.getproxies()
    found = named.get(parts.scheme) or named.get("all")
    if not found:
        return {}
    try:
        proxy = URL(found)
    except ValueError:
        proxy = URL()
    if proxy.scheme not in ("http", "https"):
        raise NoAnswerError(
            f"no proxy for {parts.scheme}",
            seen="an address that is not shown, as it may hold a password",
            expected="one that begins with http:// or https://",
            remedy=f"change {parts.scheme.upper()}_PROXY, or name the host in NO_PROXY",
        )
    password = None if proxy.user is None else aiohttp.BasicAuth(proxy.user, proxy.password or "")
    return {"proxy": proxy.with_user(None), "proxy_auth": password}


@cache
def _trusted() -> ssl.SSLContext:
    """Returns what certificates are checked against: those of the system and those of certifi."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
