"""Messages over a WebSocket: what comes back, and what is refused whoever answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from moerl.http.client import NoAnswerError
from moerl.http.websocket import JsonSocket, open_socket

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asked(handler: Handler, *messages: Any, seconds: float = 60.0, max_bytes: int = 1000) -> list[Any]:
    """Returns what a server answers to messages, one after the other."""

    async def run() -> list[Any]:
        app = web.Application()
        app.router.add_get("/ws", handler)
        app.router.add_get("/elsewhere", echo)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/ws"
            async with open_socket(url, max_bytes=max_bytes) as socket:
                return [await socket.ask(message, seconds) for message in messages]
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def echo(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        await socket.send_str(message.data)
    return socket


def saying(text: str | bytes | None) -> Handler:
    """A server that says this to everything, or goes away."""

    async def handler(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            if text is None:
                break
            await (socket.send_bytes(text) if isinstance(text, bytes) else socket.send_str(text))
        return socket

    return handler


def test_each_message_gets_its_answer() -> None:
    messages: list[Any] = [{"a": 1}, ["b", 10**30], {"c": "\u00e9"}]
    assert asked(echo, *messages) == messages


@pytest.mark.parametrize("text", ["no json", b"{}", None, "[" * 100_000, '"' + "x" * 2000 + '"'])
def test_an_answer_that_is_no_short_json_text_is_none(text: str | bytes | None) -> None:
    with pytest.raises(NoAnswerError):
        asked(saying(text), {})


def test_an_answer_that_does_not_come_in_time_is_none() -> None:
    async def silent(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            pass
        return socket

    with pytest.raises(NoAnswerError, match="no answer in time"):
        asked(silent, {}, seconds=0.01)


def test_a_message_that_nobody_takes_is_given_up() -> None:
    """The server reads nothing: what does not fit into the buffers of the connection is never sent."""

    async def deaf(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(timeout=0.1)
        await socket.prepare(request)
        assert request.transport is not None
        request.transport.pause_reading()
        await asyncio.sleep(1.0)  # it notices nothing that it could end at
        return socket

    with pytest.raises(NoAnswerError, match="no answer in time"):
        asked(deaf, "x" * (1 << 26), seconds=0.1)


def test_redirects_are_not_followed() -> None:
    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    with pytest.raises(NoAnswerError, match="a redirect"):
        asked(moved, {})


def test_what_is_no_websocket_and_nobody_at_all_are_said_to_be_none() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    with pytest.raises(NoAnswerError, match="the connection failed"):
        asked(page, {})

    async def nobody() -> JsonSocket:
        async with open_socket("http://127.0.0.1:9/ws", max_bytes=10) as socket:
            return socket

    with pytest.raises(NoAnswerError, match="the connection failed"):
        asyncio.run(nobody())
