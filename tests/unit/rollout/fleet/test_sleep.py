"""Servers on the trainer's devices: asleep from the end of sampling to the next update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import full_updates
import pytest
import torch
from fleet_fake import FakeLauncher, FakeServer, make_requests
from waiting import eventually

from moerl.errors import EngineError
from moerl.rollout.fleet.engine import FleetEngine

TENSOR = torch.zeros(2, 3)


@pytest.fixture
def engine_on(engine_on: Callable[..., FleetEngine]) -> Callable[..., FleetEngine]:
    return partial(engine_on, shapes={"a": (2, 3)}, version=-1)


def send(engine: FleetEngine, version: int) -> None:
    full_updates.send(engine, version, {"a": TENSOR + version})


def engines(engine: FleetEngine) -> set[str]:
    """That answer."""
    return {record.engine_id for record in engine.generate(make_requests(8))}


def test_servers_that_sleep_are_asked_for_nothing_until_an_update_wakes_them(
    servers: list[FakeServer], engine_on: Callable[..., FleetEngine]
) -> None:
    engine = engine_on(servers[0], servers[1])
    send(engine, 3)
    assert engines(engine) == {"e-0", "e-1"}
    engine.sleep()
    assert [server.steps[-1] for server in servers[:2]] == ["sleep", "sleep"]
    with pytest.raises(EngineError, match="its servers sleep"):
        list(engine.generate(make_requests(1)))
    send(engine, 4)
    assert engines(engine) == {"e-0", "e-1"}
    assert [float(server.held["a"][0, 0]) for server in servers[:2]] == [4.0, 4.0]


def test_a_server_that_does_not_fall_asleep_is_replaced_and_the_other_one_sleeps(
    servers: list[FakeServer], engine_on: Callable[..., FleetEngine], said: list[str]
) -> None:
    engine = engine_on(FakeLauncher(servers[0], servers[2]), servers[1])
    send(engine, 3)
    servers[0].fail("sleep")
    engine.sleep()
    assert "lost" in said[0]
    assert servers[1].steps[-1] == "sleep"
    eventually(lambda: engine.states["e-0"] == "healthy")
    send(engine, 4)
    assert engines(engine) == {"e-0", "e-1"}
    assert [server.weight_version for server in servers[1:]] == [4, 4]


def test_servers_do_not_sleep_while_they_have_work(
    servers: list[FakeServer], engine_on: Callable[..., FleetEngine]
) -> None:
    engine = engine_on(servers[0])
    send(engine, 3)
    records = engine.generate(make_requests(4))
    next(records)
    with pytest.raises(EngineError, match="cannot sleep; seen: 1 calls under way"):
        engine.sleep()
    assert len(list(records)) == 3
    assert "sleep" not in servers[0].steps


def test_an_update_that_is_broken_off_wakes_servers_with_what_they_held(
    servers: list[FakeServer], engine_on: Callable[..., FleetEngine]
) -> None:
    engine = engine_on(servers[0])
    send(engine, 3)
    engine.sleep()
    engine.begin_update(full_updates.full(4, {"a": TENSOR}))
    engine.abandon_update()
    assert engines(engine) == {"e-0"}
    assert (servers[0].weight_version, float(servers[0].held["a"][0, 0])) == (3, 3.0)
