"""Engines on fake servers, closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sglang_fake import FakeServer, FakeSource, connect

from moerl.rollout.sglang.engine import SGLangEngine


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
