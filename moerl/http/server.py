"""Server of JSON over HTTP on loopback, in the event loop that opens it. Each caller is known by its key."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

MAX_BODY_BYTES = 64 << 20
"""The longest request; a conversation of a million tokens has some 10 MB."""


@dataclass(frozen=True, slots=True)
class JsonReply:
    """Answer of a handler."""

    content: Any
    """JSON data; of a stream its events, in order."""
    status: int = 200
    """HTTP status."""
    is_stream: bool = False
    """True if `content` is a sequence that is sent as server-sent events, with `[DONE]` behind them."""
    names_events: bool = False
    """True if each event of a stream is sent with its `type` as its name, and nothing behind the last one."""


Handler = Callable[[str, str, Any], Awaitable[JsonReply]]
"""Answers a request; gets method, path and JSON body (None if there is none). Cancelled if the caller goes away."""


class JsonServer:
    """Server whose callers come and go. Belongs to one event loop."""

    def __init__(self) -> None:
        # By key: who answers the caller, and what is under way for it.
        self._callers: dict[str, tuple[Handler, set[asyncio.Task[Any]]]] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._port = 0

    @asynccontextmanager
    async def admit(self, handler: Handler) -> AsyncIterator[tuple[str, str]]:
        """Admits a caller as long as the context lasts; yields the server's address and the caller's key. Requests that
        are under way at its end are cancelled."""
        await self._start()
        key, tasks = secrets.token_urlsafe(32), set[asyncio.Task[Any]]()
        self._callers[key] = handler, tasks
        try:
            yield f"http://127.0.0.1:{self._port}", key
        finally:
            del self._callers[key]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Ends the server; it may be used again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", self._serve)
            # A caller that gave up reads no answer: what it asked for is not to happen.
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
            except BaseException:
                await runner.cleanup()
                raise
            self._runner, self._port = runner, runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        caller = self._callers.get(_key(request))
        if caller is None:
            return _json(refusal("no such key; an episode's key ends with it", "invalid_api_key"), 401)
        handler, tasks = caller
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            try:
                text = await request.text()
                body = json.loads(text) if text else None
                if "\\ud" in text.lower():  # half of a pair: no text that can be written
                    json.dumps(body, ensure_ascii=False).encode()
            except (ValueError, LookupError, RecursionError):
                return _json(refusal("the body is no JSON of whole characters", "invalid_json"), 400)
            reply = await handler(request.method, request.path, body)
            return await _events(request, reply) if reply.is_stream else _json(reply.content, reply.status)
        finally:
            tasks.discard(task)


def refusal(message: str, code: str) -> dict[str, Any]:
    """Returns an error as clients of OpenAI's API and of Anthropic's read it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"type": "error", "error": error}


def _key(request: web.Request) -> str:
    """Returns the key in the header of OpenAI's clients, or of Anthropic's; empty if there is none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _json(content: Any, status: int) -> web.Response:
    return web.json_response(content, status=status)


async def _events(request: web.Request, reply: JsonReply) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in reply.content:
        name = f"event: {event['type']}\n" if reply.names_events else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    if not reply.names_events:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
