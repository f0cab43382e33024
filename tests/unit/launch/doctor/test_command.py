"""`moerl doctor` as a command."""

from __future__ import annotations

import io
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from moerl.cli import main
from moerl.errors import MoerlError
from moerl.launch.checks.outcome import Check, fault, worst
from moerl.launch.doctor import servers
from moerl.launch.doctor.command import lines, show, summary
from moerl.launch.doctor.shared import exchange

RED = Check("machine", "port 1", "red", "taken \x1b[2J", "free", "end it")
GREEN = Check("machine", "disk", "green", "500 MB/s")


@pytest.fixture(autouse=True)
def _of_this_test_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens of the user and servers of other tests are not looked at."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setattr(servers.own_listeners, "__defaults__", (re.compile("^(planted-here)$"),))
    monkeypatch.chdir(tmp_path)


def test_this_machine_has_no_fault_and_sees_another_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both, alone = tmp_path / "both", tmp_path / "alone"
    both.mkdir()
    alone.mkdir()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(exchange, both, "b", "host", nodes=2, seconds=500.0)
        words = ["--shared", str(both), "--nodes", "2", "--within", "400", "--node", "a", "--runs", str(alone)]
        status = main(["doctor", "recipe=tiny", "--json", *words])
        assert [seen.probe.node for seen in other.result().present] == ["a"]
    found = json.loads(capsys.readouterr().out)
    assert [check for check in found["checks"] if check["level"] == "red"] == []
    assert status == 0
    areas = {check["area"] for check in found["checks"]}
    assert areas == {"packages", "accelerators", "servers", "machine", "run", "shared folder"}
    assert list(alone.iterdir()) == []


def test_each_fault_is_a_line_with_its_remedy_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ["--port", str(port), "--shared", str(tmp_path / "none")]
        status = main(["doctor", "recipe=tiny", "rollout=sglang", *words])
    text = capsys.readouterr().out
    assert status == 1
    assert f"red     machine | port {port}: 127.0.0.1:{port}: Address already in use\n" in text
    assert "red     run | SGLang environment: " in text
    assert f"red     shared folder | nodes that see it: {tmp_path / 'none'}: No such file" in text
    assert "        remedy: end what listens there" in text
    assert text.endswith(" 3 red\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "--port: no port"),
        (["--shared", ".", "--nodes", "0"], "--nodes"),
        (["--nodes", "2"], "add --shared DIR"),
        (["rollout.tempature=1"], "rollout.temperature"),
        (["resume=runs/one"], "resume"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_terminal_gets_a_table() -> None:
    console = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    show([GREEN, RED], console, as_json=False)
    text = console.export_text()
    assert "port 1" in text
    assert "remedy: end it" in text
    assert "500 MB/s" in text


def test_texts_of_others_are_made_printable() -> None:
    assert lines([RED]) == [
        "red     machine | port 1: taken \\x1b[2J",
        "        expected: free",
        "        remedy: end it",
    ]
    assert summary([RED, GREEN]) == "1 green, 0 yellow, 1 red"


def test_an_error_becomes_a_look() -> None:
    error = MoerlError("disk: full", seen="0 bytes", expected="1 byte", remedy="make room")
    assert fault("yellow", "machine", "disk", error) == Check(
        "machine", "disk", "yellow", "disk: full: 0 bytes", "1 byte", "make room"
    )


def test_the_worst_level_counts() -> None:
    assert [worst(checks) for checks in ([], [GREEN], [GREEN, RED])] == ["green", "green", "red"]
