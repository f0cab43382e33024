"""The end of a child process by what happens to its connection, and what counts as running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

from moerl.processes.child import Child, describe_output
from moerl.processes.parent import is_running

SERVES = """
import sys
from moerl.processes.channel import receive, send
from moerl.processes.parent import connected
with connected(sys.argv[1]) as connection:
    send(connection, b"begun")
    {body}
"""


def started(body: str, log: Path) -> Child:
    child = Child([sys.executable, "-c", SERVES.format(body=body)], log)
    child.receive(60.0)
    return child


@pytest.mark.parametrize("error", ["EOFError", "BrokenPipeError", "ConnectionResetError"])
def test_an_error_of_something_else_is_not_taken_for_the_end_of_the_connection(error: str, tmp_path: Path) -> None:
    child = started(f"raise {error}('of a file')", tmp_path / "log")
    assert child.describe_end(60.0) == "it ended with status 1"
    assert f"{error}: of a file" in (tmp_path / "log").read_text()
    child.release()


def test_a_child_ends_in_silence_once_its_connection_is_gone(tmp_path: Path) -> None:
    child = started("receive(connection)", tmp_path / "log")
    child.socket.close()
    assert child.describe_end(60.0) == "it ended with status 0"
    assert describe_output(child.log) == "it wrote nothing"
    child.release()


def test_a_process_that_nobody_has_waited_for_has_ended_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_running(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        eventually(lambda: not is_running(process.pid))
        assert process.returncode is None
    assert not is_running(process.pid)
    assert is_running(1)
