"""One sender and two live servers: every bucket passes through the first server to the second."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import families
import pytest
import sglang_live
from full_updates import full
from safetensors.torch import load_file
from torch import Tensor

from moerl.kernels.checksum import checksums
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.replica import State
from moerl.rollout.sglang.server import ServerOptions, SGLangServer

pytestmark = [pytest.mark.sglang]

UPDATE_SECONDS = 60.0


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Tensor]]:
    """Not those that the servers start with."""
    folder = families.write_model(tmp_path_factory.mktemp("other") / "hf", families.FAMILIES["qwen3_moe"], seed=1)
    return list(load_file(folder / "model.safetensors").items())


@pytest.fixture(scope="module")
def servers(
    environment: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[SGLangServer]]:
    options = ServerOptions(model_folder, environment, "cpu", dtype="float32", max_pool_tokens=8192, policy_version=-1)
    folder = tmp_path_factory.mktemp("two")
    with sglang_live.running(options, folder / "a") as a, sglang_live.running(options, folder / "b") as b:
        yield [a, b]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def engine(
    servers: list[SGLangServer], tensors: list[tuple[str, Tensor]], model: ModelFacts, said: list[str]
) -> Iterator[FleetEngine]:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    endpoints = [server.endpoint for server in servers]
    made = sglang_live.connect(
        *endpoints, model=model, version=-1, shapes=shapes, notify=said.append, update_seconds=UPDATE_SECONDS
    )
    yield made
    made.close()


def update(
    engine: FleetEngine, version: int, tensors: list[tuple[str, Tensor]], between: Callable[[], None] = lambda: None
) -> None:
    """In two buckets, checked; `between` happens in between."""
    half = len(tensors) // 2
    engine.held_dtypes()
    engine.begin_update(full(version, tensors))
    engine.receive(tensors[:half])
    between()
    engine.receive(tensors[half:])
    engine.end_update()
    engine.verify(checksums(tensors))


def test_two_servers_hold_what_one_sender_sends_through_both(
    engine: FleetEngine, servers: list[SGLangServer], tensors: list[tuple[str, Tensor]], said: list[str]
):
    for version in (3, 4):
        changed = [(name, tensor + version) for name, tensor in tensors]
        update(engine, version, changed)
        # A server whose digests differ would be stale, and say so.
        assert list(engine.states.values()) == [State.HEALTHY] * 2
    assert said == []
    for server in servers:
        log = server.log.read_text()
        assert log.count("init custom process group") == 1
        assert "world_size=3" in log


def test_a_server_that_is_killed_in_an_update_leaves_the_other_updated(
    engine: FleetEngine, servers: list[SGLangServer], tensors: list[tuple[str, Tensor]], said: list[str]
):
    update(engine, 5, tensors, between=lambda: os.killpg(servers[0].endpoint.pid, signal.SIGKILL))
    assert engine.states["sglang-1"] is State.HEALTHY
    assert engine.handshake().policy_version == 5
    assert any("'sglang-0' is lost" in line and "bucket 1" in line for line in said)
