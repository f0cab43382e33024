"""The server of agents: what becomes of a request when its caller is no longer admitted."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from moerl.http.server import JsonReply, JsonServer

EVENTS = [{"text": "x" * (1 << 20)} for _ in range(64)]


def test_a_stream_that_is_under_way_is_cut_off_when_its_caller_is_not_admitted_any_more() -> None:
    async def answer(method: str, path: str, body: Any) -> JsonReply:
        return JsonReply(EVENTS, is_stream=True)

    async def run() -> bytes:
        server = JsonServer()
        async with aiohttp.ClientSession(read_bufsize=1 << 10) as session:
            async with server.admit(answer) as (address, key):
                response = await session.post(address, headers={"Authorization": f"Bearer {key}"}, data="{}")
            try:
                return await response.read()
            except aiohttp.ClientError:
                return b""
            finally:
                response.close()
                await server.close()

    assert b"[DONE]" not in asyncio.run(run())
