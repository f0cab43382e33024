"""Messages over a WebSocket, one answer for each question. Runs in the caller's event loop.

As in `moerl.http.client`, whoever answers is not trusted: bytes and time are limited, nothing is compressed, and no
redirect is followed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec

from moerl.http.client import NoAnswerError, decoded, no_time

_CONNECT_SECONDS, _CLOSE_SECONDS = 10.0, 1.0


class JsonSocket:
    """An open WebSocket that carries JSON. One question at a time."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._url, self._socket = url, socket

    async def tell(self, message: Any, seconds: float) -> None:
        """Sends a message that has no answer. Raises `NoAnswerError` if the connection has ended, or takes none."""
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_str(json.dumps(message))
        except TimeoutError:
            raise no_time(self._url, seconds) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _failed(self._url, f"{type(error).__name__}: {error}") from error

    async def ask(self, message: Any, seconds: float) -> Any:
        """Sends a message and returns the next one that comes. seconds: limit of sending, and of waiting for it.

        Raises:
            NoAnswerError: none is taken or comes in time, or it is no JSON.
        """
        await self.tell(message, seconds)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._socket.receive()
        except TimeoutError:
            raise no_time(self._url, seconds) from None
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise _failed(self._url, f"{answer.type.name.lower()} {answer.extra or ''}".strip())
        return decoded(answer.data.encode(), msgspec.json.decode)


@asynccontextmanager
async def open_socket(url: str, *, max_bytes: int) -> AsyncIterator[JsonSocket]:
    """Opens a WebSocket as long as the context lasts.

    Args:
        url: absolute address, http or https.
        max_bytes: the longest message that can be an answer.

    Raises:
        NoAnswerError: nobody listens there, or it is no WebSocket.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(
        timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[trace]
    ) as session:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                socket = await session.ws_connect(url, max_msg_size=max_bytes, compress=0)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _failed(url, f"{type(error).__name__}: {error}") from None
        except TimeoutError:
            raise no_time(url, _CONNECT_SECONDS) from None
        try:
            yield JsonSocket(url, socket)
        finally:
            # Says goodbye to whoever still reads; the session then drops the connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await socket.close()


async def _refuse_redirect(session: object, context: object, params: aiohttp.TraceRequestRedirectParams) -> None:
    raise _failed(str(params.url), "a redirect")


def _failed(url: str, seen: str) -> NoAnswerError:
    return NoAnswerError("the connection failed", seen=f"{url}: {seen}"[:2000], remedy="look at the server's log")
