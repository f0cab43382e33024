"""Engines on fake servers, closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sglang_fake import FakeLauncher, FakeServer, connect

from moerl.rollout.fleet import backoff
from moerl.rollout.fleet.engine import FleetEngine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(backoff, "PAUSE_SECONDS", (0.0, 0.0, 0.0))
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engine_on(said: list[str]) -> Iterator[Callable[..., FleetEngine]]:
    engines: list[FleetEngine] = []

    def make(*launchers: FakeLauncher | FakeServer, **changes: Any) -> FleetEngine:
        engines.append(connect(*launchers, said=said, **changes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
