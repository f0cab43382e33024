from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest

from moerl.errors import EngineError
from moerl.rollout.fleet.endpoint import Endpoint, write_endpoint
from moerl.rollout.sglang import launchers
from moerl.rollout.sglang.launchers import NamedServer, OwnServer
from moerl.rollout.sglang.server import ServerOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Endpoint]:
    """Servers that answer health checks."""
    monkeypatch.setattr(launchers, "_POLL_SECONDS", 0.01)
    found: list[Endpoint] = []
    monkeypatch.setattr(launchers, "answers_health", lambda endpoint: endpoint in found)
    return found


def test_a_named_server_is_taken_once_it_serves(served: list[Endpoint], tmp_path: Path):
    endpoint = Endpoint("http://127.0.0.1:1", "key", "admin")
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(NamedServer(tmp_path / "server.json", 20.0).open)
        write_endpoint(endpoint, tmp_path / "server.json")
        served.append(endpoint)
        assert taken.result() == endpoint


@pytest.mark.parametrize("has_file", [False, True])
def test_a_named_server_that_does_not_serve_in_time_is_an_error_that_says_why(
    has_file: bool, served: list[Endpoint], tmp_path: Path
):
    if has_file:
        write_endpoint(Endpoint("http://127.0.0.1:1", "key", "admin"), tmp_path / "server.json")
    why = "no answer from http://127.0.0.1:1" if has_file else "no such file"
    with pytest.raises(EngineError, match=why):
        NamedServer(tmp_path / "server.json", 0.05).open()


def test_closing_ends_the_wait_for_a_named_server(served: list[Endpoint], tmp_path: Path):
    source = NamedServer(tmp_path / "server.json", 1000.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.open)
        source.close()
        with pytest.raises(EngineError, match="closed while"):
            waiting.result(20.0)


class FailingServer:
    """Fault injection: a server that ends while it starts, as often as `problems` says; its logs are those."""

    problems: ClassVar[list[str]] = []
    num_started: ClassVar[int] = 0

    def __init__(self, options: object, folder: Path) -> None:
        type(self).num_started += 1
        self.problem = self.problems.pop(0) if self.problems else ""
        self.endpoint = Endpoint("http://127.0.0.1:1", "key", "admin")

    @property
    def lost_a_port(self) -> bool:
        return "EADDRINUSE" in self.problem

    def wait_until_ready(self, timeout_seconds: float) -> None:
        if self.problem:
            raise EngineError(self.problem)

    def stop(self) -> None:
        """It has ended."""


@pytest.mark.parametrize(
    ("problems", "num_started", "raised"),
    [
        (["EADDRINUSE"], 2, ""),
        (["EADDRINUSE"] * 2, 3, ""),
        (["EADDRINUSE"] * 3, 3, "EADDRINUSE"),
        (["no such model"], 1, "no such model"),
    ],
)
def test_a_server_of_our_own_that_lost_a_port_to_another_one_is_started_again(
    problems: list[str], num_started: int, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FailingServer, "problems", list(problems))
    monkeypatch.setattr(FailingServer, "num_started", 0)
    monkeypatch.setattr(launchers, "SGLangServer", FailingServer)
    source = OwnServer(ServerOptions(tmp_path, tmp_path), tmp_path, 1.0)
    with pytest.raises(EngineError, match=raised) if raised else nullcontext():
        source.open()
    assert FailingServer.num_started == num_started
