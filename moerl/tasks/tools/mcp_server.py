"""Tools of a server that speaks MCP over its standard streams, started for one episode. Needs the package `mcp` (extra
`environments`).

    event loop of the episodes   speaks with the server over a socket
    guard, guard                 `moerl.processes.guard`: ends the server and all that it has started
    server                       has the other end of the socket as standard input and output

Everything ends with the context, also if its episode is cancelled; with the socket, also if nobody runs the end of the
context; and with the controller, also if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from moerl.contract.episodes import in_thread
from moerl.errors import ConfigError, EpisodeError, note_later, undoing
from moerl.processes.host import end_guarded, start_guarded
from moerl.tasks.tools.loop import Tool, ToolCallError, tool_schema
from moerl.telemetry.terminal import excerpt

MAX_LINE_BYTES = 16 << 20
"""Longest message of a server."""
_SAID_BYTES = 500


@contextlib.asynccontextmanager
async def mcp_tools(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    memory_bytes: int = 8 << 30,
) -> AsyncIterator[list[Tool]]:
    """Starts an MCP server; the tools that it lists can be called as long as the context lasts. Enter and leave it in
    the coroutine of the episode. At its end the server is killed.

    Args:
        command: program and arguments of the server.
        environment: variables of the server besides HOME, LOGNAME, PATH, SHELL, TERM and USER, those that MCP's own
            client passes on.
        folder: working directory of the server; None = that of this process.
        memory_bytes: most memory of each of its processes.

    Raises:
        ConfigError: the package `mcp` is missing, or there is no such program.
        EpisodeError: the server does not answer as MCP says. Its last words are in the error.
    """
    # The first import takes seconds, which other episodes would wait for.
    mcp, stdio = await in_thread(lambda: (_library("mcp"), _library("mcp.client.stdio")))
    variables = stdio.get_default_environment() | dict(environment or {})
    server = _Server(_program(command, variables), variables, folder, memory_bytes)
    client = mcp.Client(server)
    try:
        await client.__aenter__()
    except Exception as error:  # process boundary: whatever MCP makes of what a server wrote
        raise server.lost(f"{type(error).__name__}: {error}") from error
    async with _left(client):
        yield [_ServerTool(client, server, each) for each in await _listed(client, server)]


@contextlib.asynccontextmanager
async def _left(client: Any) -> AsyncIterator[None]:
    """Leaves a client that was entered. It is not told of an error, which it would raise in a group of errors."""
    try:
        yield
    except BaseException as first:
        try:
            await client.__aexit__(None, None, None)
        except Exception as later:  # noqa: BLE001 - noted
            note_later(first, later)
        raise
    await client.__aexit__(None, None, None)


async def _listed(client: Any, server: _Server) -> list[Any]:
    """Returns all tools of a server, which may list them in parts."""
    tools, cursor = list[Any](), None
    try:
        while True:
            part = await client.list_tools(cursor=cursor)
            tools += part.tools
            cursor = part.next_cursor
            if cursor is None:
                return tools
    except Exception as error:  # process boundary: whatever MCP makes of what a server wrote
        raise server.lost(f"{type(error).__name__}: {error}") from error


class _ServerTool:
    """A tool of a server."""

    def __init__(self, client: Any, server: _Server, listed: Any) -> None:
        self._client, self._server, self._name = client, server, str(listed.name)
        self.schema = tool_schema(listed.name, listed.description or "", listed.input_schema)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns the texts of a result; other contents are named.

        Raises:
            ToolCallError: the server says that the call failed.
            EpisodeError: the server has ended.
        """
        try:
            result = await self._client.call_tool(self._name, dict(arguments))
        except Exception as error:  # process boundary: whatever MCP makes of what a server wrote
            if self._server.has_ended:
                raise self._server.lost(str(error)) from error
            raise ToolCallError(str(getattr(error, "message", error))) from error
        parts = [str(each.text) if each.type == "text" else f"[{each.type} left out]" for each in result.content]
        if result.is_error:
            raise ToolCallError("\n".join(parts))
        return "\n".join(parts)


class _Server:
    """A server's process, as a transport of MCP's client: entered and left once, by that client."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], folder: Path | None, memory_bytes: int
    ) -> None:
        self._command, self._variables, self._folder, self._memory_bytes = command, variables, folder, memory_bytes
        self._said = ""
        self.has_ended = False
        """True once the server has closed its output."""

    async def __aenter__(self) -> tuple[_Messages, _Messages]:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
            # From here on nothing is awaited: a process that is started has its end in `__aexit__`.
            with undoing(self._writer.close):
                self._start(theirs)
        messages = _Messages(self, reader, self._writer)
        return messages, messages

    async def __aexit__(self, *error: object) -> None:
        self.has_ended = True
        self._writer.close()
        # Its thread goes on if this task is cancelled meanwhile.
        await in_thread(self._end)

    def lost(self, seen: str) -> EpisodeError:
        """Returns the error for a server that has ended, or that does not speak MCP."""
        return EpisodeError(
            f"the MCP server {Path(self._command[0]).name} is lost",
            seen=excerpt(f"{seen}; its last words: {self._last_words() or 'none'}", 2 * _SAID_BYTES),
            expected="a server that speaks MCP over its standard streams until the episode ends",
            remedy="run its command by hand; give it variables by environment=, memory by memory_bytes=",
        )

    def _start(self, streams: socket.socket) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_end`
        with undoing(self._stderr.close):
            self._status, status = os.pipe()
            os.set_blocking(self._status, False)
            with open(status, "wb"):
                self._process = start_guarded(
                    self._command,
                    self._memory_bytes,
                    status,
                    stdin=streams,
                    stdout=streams,
                    stderr=self._stderr,
                    cwd=self._folder,
                    env=self._variables,
                )

    def _end(self) -> None:
        end_guarded(self._process, self._told)
        os.close(self._status)
        self._said = self._last_words()
        self._stderr.close()

    def _told(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._status, 4096)
        return b""

    def _last_words(self) -> str:
        if self._stderr.closed:
            return self._said
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), _SAID_BYTES, max(size - _SAID_BYTES, 0)).decode(errors="replace").strip()


class _Messages:
    """Messages from and to a server, in the forms of a read and a write stream of MCP. The server ends with its
    transport, and not with a stream."""

    def __init__(self, server: _Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server, self._reader, self._writer = server, reader, writer
        self._message: Any = _library("mcp.shared.message").SessionMessage
        self._read: Any = _library("mcp_types").jsonrpc_message_adapter.validate_json
        self._broken: Any = _library("anyio").BrokenResourceError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Does nothing."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Returns the next message, or the error of one that is none; ends with the server's output."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError):  # the server is gone, or its line is longer than any
            line = b""
        if not line:
            self._server.has_ended = True
            raise StopAsyncIteration
        try:
            return self._message(self._read(line, by_name=False))
        except ValueError as error:
            return error

    async def receive(self) -> Any:
        """Returns the next message as `__anext__` does."""
        return await anext(self)

    async def send(self, item: Any) -> None:
        """Sends one message."""
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            self._writer.write(f"{line}\n".encode())
            await self._writer.drain()
        except OSError as error:
            raise self._broken from error


def _program(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns a command with the whole path of its program."""
    found = shutil.which(command[0], path=variables.get("PATH"))
    if found is None:
        raise ConfigError(
            "the MCP server cannot be started",
            seen=command[0],
            expected="a program that is there",
            remedy="install it, or give the whole path",
        )
    return [os.path.abspath(found), *command[1:]]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "tools of an MCP server need the package mcp",
            seen=str(error),
            expected="the extra `environments`",
            remedy='pip install "moerl[environments]"',
        ) from error
