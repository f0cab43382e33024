"""Engines on fake servers, closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet_fake import FakeLauncher, FakeServer, Network

from moerl.rollout.fleet import backoff
from moerl.rollout.fleet.engine import FleetEngine


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[FakeServer]:
    monkeypatch.setattr(backoff, "PAUSE_SECONDS", (0.0, 0.0, 0.0))
    return [FakeServer() for _ in range(3)]


@pytest.fixture
def network(servers: list[FakeServer]) -> Network:
    return Network(servers)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engine_on(network: Network, said: list[str]) -> Iterator[Callable[..., FleetEngine]]:
    engines: list[FleetEngine] = []

    def make(*launchers: FakeLauncher | FakeServer, **changes: Any) -> FleetEngine:
        engines.append(network.engine(*launchers, said=said, **changes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
