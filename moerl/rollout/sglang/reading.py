"""Answers of servers as they came over the wire: no longer than what was asked for can take, and never expanded.

A compressed answer would pass every limit: 131 KB of zstd make 4 GiB. We ask for none, and refuse one before its first
byte is looked at. Any process that talks to a server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from moerl.rollout.fleet.backend import TransportError

AS_IT_IS = {"Accept-Encoding": "identity"}
"""Headers of every request to a server."""

MAX_SAID_BYTES = 1 << 16
"""Of an answer that only says that something was done, and what is kept of one that says what went wrong."""

MAX_FACTS_BYTES = 1 << 22
"""Of an answer about the server itself; `/server_info` takes 36 KB, and 20 KB more for every data-parallel rank."""


async def read(path: str, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body of a streamed response; the beginning of it where the status is another than 200.

    Raises:
        TransportError: it is compressed, or longer than `max_bytes`.
    """
    # One buffer: of pieces of one byte each, a list would take forty times as much.
    content = bytearray()
    async for piece in pieces(path, response):
        content += piece
        if response.status != 200:
            if len(content) >= MAX_SAID_BYTES:
                break
        elif len(content) > max_bytes:
            raise TransportError(
                f"SGLang {path}: the answer is too long",
                seen=f"more than {max_bytes} bytes",
                expected="no more than what was asked for takes",
                remedy="look at the server's log",
            )
    return bytes(content)


def pieces(path: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body of a streamed response as it comes.

    Raises:
        TransportError: it is compressed.
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise TransportError(
            f"SGLang {path}: the answer is encoded",
            seen=f"Content-Encoding: {encoding[:100]}",
            expected="the answer as it is",
            remedy="reach the server directly, without a proxy that compresses",
        )
    return response.content.iter_any()
