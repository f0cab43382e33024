"""Answers of servers as they came over the wire: no longer than what was asked for can take, and never expanded.

A compressed answer would pass every limit: 131 KB of zstd make 4 GiB. We ask for none, and refuse one before its first
byte is looked at. Any process that talks to a server.
"""

from __future__ import annotations

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
    intake = _Intake(path, response, max_bytes)
    async for piece in response.content.iter_any():
        if intake.takes(piece):
            break
    return intake.content()


class _Intake:
    def __init__(self, path: str, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise TransportError(
                f"SGLang {path}: the answer is encoded",
                seen=f"Content-Encoding: {encoding[:100]}",
                expected="the answer as it is",
                remedy="reach the server directly, without a proxy that compresses",
            )
        self._path, self._max_bytes, self._is_whole = path, max_bytes, response.status == 200
        # One buffer: of pieces of one byte each, a list would take forty times as much.
        self._content = bytearray()

    def takes(self, piece: bytes) -> bool:
        """Takes a piece; True where no more is wanted."""
        self._content += piece
        if not self._is_whole:
            return len(self._content) >= MAX_SAID_BYTES
        if len(self._content) > self._max_bytes:
            raise TransportError(
                f"SGLang {self._path}: the answer is too long",
                seen=f"more than {self._max_bytes} bytes",
                expected="no more than what was asked for takes",
                remedy="look at the server's log",
            )
        return False

    def content(self) -> bytes:
        return bytes(self._content)
