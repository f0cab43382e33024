"""Engines on fake servers, closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sglang_fake import FakeLink, FakePartLink, FakeServer, FakeSource, connect

from moerl.rollout.sglang import fleet, http, shard_sender, updates
from moerl.rollout.sglang.engine import SGLangEngine


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """Three that take weights without process groups."""
    monkeypatch.setattr(http, "_BACKOFF_SECONDS", (0.0, 0.0, 0.0))
    made = [FakeServer() for _ in range(3)]
    for kept in ("sent", "held", "samples", "before"):
        monkeypatch.setattr(FakeLink, kept, {})
    monkeypatch.setattr(FakeLink, "servers", {server.endpoint.url: server for server in made})
    monkeypatch.setattr(fleet, "WeightLink", FakeLink)
    monkeypatch.setattr(updates, "WeightLink", FakeLink)
    monkeypatch.setattr(shard_sender, "WeightLink", FakePartLink)
    yield made
    for server in made:
        server.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engine_on(said: list[str]) -> Iterator[Callable[..., SGLangEngine]]:
    engines: list[SGLangEngine] = []

    def make(*sources: FakeSource | FakeServer, **changes: Any) -> SGLangEngine:
        engines.append(connect(*sources, said=said, **changes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
