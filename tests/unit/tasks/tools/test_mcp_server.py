"""Tools of a real MCP server: they are called, and the server ends with its episode, however that ends."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from process_tree import signals_to_children
from waiting import eventually, is_alive

from moerl.errors import ConfigError, EpisodeError
from moerl.tasks.tools.loop import Tool, ToolCallError
from moerl.tasks.tools.mcp_server import mcp_tools

SERVER = '''
import asyncio, os, subprocess, sys
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")
arrived = 0

@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b

@server.tool()
async def meet(others: int) -> str:
    """Waits for other calls."""
    global arrived
    arrived += 1
    while arrived < others:
        await asyncio.sleep(0.01)
    return "met"

@server.tool()
def refuse() -> str:
    raise ToolError("no such city")

@server.tool()
def pids() -> str:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return f"{os.getpid()} {child.pid}"

@server.tool()
def leave() -> str:
    os.write(2, b"goodbye")
    os._exit(3)

@server.tool()
async def hang() -> str:
    await asyncio.sleep(600)
    return ""

server.run()
'''
environments = pytest.mark.environments
needs_mcp = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None, reason="needs the package mcp: pip install moerl[environments]"
)
Serve = Callable[[], AbstractAsyncContextManager[list[Tool]]]
PATHS = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    (tmp_path / "server.py").write_text(SERVER)
    return lambda: mcp_tools([sys.executable, str(tmp_path / "server.py")], environment=PATHS)


def named(tools: list[Tool]) -> dict[str, Tool]:
    return {each.schema["function"]["name"]: each for each in tools}


def assert_gone(pids: str) -> None:
    for pid in pids.split():
        eventually(lambda pid=int(pid): not is_alive(pid))


@environments
@needs_mcp
def test_tools_are_listed_with_their_schemas_and_called(serve: Serve) -> None:
    async def episode() -> None:
        async with serve() as tools:
            by_name = named(tools)
            assert set(by_name) == {"multiply", "meet", "refuse", "pids", "leave", "hang"}
            multiply = by_name["multiply"]
            assert multiply.schema["function"]["description"] == "Multiplies two numbers."
            assert multiply.schema["function"]["parameters"]["required"] == ["a", "b"]
            assert await multiply.call({"a": 6, "b": 7}) == "42"
            assert await asyncio.gather(*(by_name["meet"].call({"others": 3}) for _ in range(3))) == ["met"] * 3
            with pytest.raises(ToolCallError, match="no such city"):
                await by_name["refuse"].call({})

    with signals_to_children():
        asyncio.run(episode())


@environments
@needs_mcp
def test_a_server_that_ends_ends_the_episode_with_its_last_words(serve: Serve) -> None:
    async def episode() -> None:
        async with serve() as tools:
            pids.append(await named(tools)["pids"].call({}))
            await named(tools)["leave"].call({})

    pids: list[str] = []
    with pytest.raises(EpisodeError, match=r"the MCP server python\S* is lost.*goodbye"):
        asyncio.run(episode())
    assert_gone(pids[0])


@environments
@needs_mcp
def test_the_error_of_an_episode_is_raised_as_it_is_and_nothing_is_left(serve: Serve) -> None:
    async def episode() -> None:
        async with serve() as tools:
            pids.append(await named(tools)["pids"].call({}))
            raise EpisodeError("of the episode")

    pids: list[str] = []
    with pytest.raises(EpisodeError, match="of the episode"):
        asyncio.run(episode())
    assert_gone(pids[0])


@environments
@needs_mcp
def test_an_episode_that_is_cancelled_in_a_call_and_again_at_its_end_leaves_nothing(serve: Serve) -> None:
    async def episode() -> None:
        async with serve() as tools:
            pids.append(await named(tools)["pids"].call({}))
            await named(tools)["hang"].call({})

    async def cancelled() -> None:
        task = asyncio.create_task(episode())
        while not pids:
            await asyncio.sleep(0.01)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        assert task.cancelled()

    pids: list[str] = []
    asyncio.run(cancelled())
    assert_gone(pids[0])


@environments
@needs_mcp
def test_a_server_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    program = f"""
import asyncio, sys
from moerl.tasks.tools.mcp_server import mcp_tools
async def episode():
    command = [sys.executable, {str(tmp_path / "server.py")!r}]
    async with mcp_tools(command, environment={PATHS!r}) as tools:
        pids = next(each for each in tools if each.schema["function"]["name"] == "pids")
        print(await pids.call({{}}), flush=True)
        await asyncio.sleep(600)
asyncio.run(episode())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **PATHS}
    ) as controller:
        assert controller.stdout is not None
        pids = controller.stdout.readline()
        assert len(pids.split()) == 2
        controller.send_signal(signal.SIGKILL)
    assert_gone(pids)


@environments
@needs_mcp
def test_a_program_that_speaks_no_mcp_is_an_error_with_its_last_words() -> None:
    async def episode(*command: str) -> None:
        async with mcp_tools(command):
            pass

    with pytest.raises(EpisodeError, match=r"is lost.*its last words: no server"):
        asyncio.run(episode(sys.executable, "-c", "import sys; sys.exit('no server')"))
    with pytest.raises(ConfigError, match="cannot be started; seen: no-such-program"):
        asyncio.run(episode("no-such-program"))


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode() -> None:
        async with mcp_tools(["true"]):
            pass

    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"need the package mcp.*moerl\[environments\]"):
        asyncio.run(episode())
