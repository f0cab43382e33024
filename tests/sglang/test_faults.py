"""Servers that die, hang or answer badly while they are used: every rollout comes once, as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import sglang_live
from full_updates import full
from safetensors.torch import load_file
from sglang_proxy import SPOILERS, spoiling
from sglang_reference import Reference, make_requests
from waiting import Work

from moerl.contract.ports import RolloutRecord
from moerl.contract.trajectory import Trajectory
from moerl.rollout.fleet import backoff
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.replica import State
from moerl.rollout.sglang.launchers import OwnServer
from moerl.rollout.sglang.server import ServerOptions, SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

MAX_NEW_TOKENS = 96


class Own:
    """An engine with servers of its own, that start without weights and are brought to hold those of a folder."""

    def __init__(self, folder: Path, options: ServerOptions, model: ModelFacts, weights: Path, count: int) -> None:
        self.tensors = list(load_file(weights / "model.safetensors").items())
        self.said: list[str] = []
        self.sources = [
            OwnServer(replace(options, first_device=i), folder / str(i), sglang_live.START_SECONDS)
            for i in range(count)
        ]
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors}
        # Two servers are killed only; one hangs, too, which four probes notice.
        probe_seconds = 5.0 if count == 1 else 60.0
        changes: dict[str, Any] = {"max_running": 8, "probe_seconds": probe_seconds, "update_seconds": 60.0}
        self.engine = sglang_live.connect(
            *self.sources, model=model, version=-1, shapes=shapes, notify=self.said.append, **changes
        )

    def update(self, version: int, between: Callable[[], None] | None = None) -> None:
        """In two buckets; `between` happens in between."""
        half = len(self.tensors) // 2
        self.engine.begin_update(full(version, self.tensors))
        self.engine.receive(self.tensors[:half])
        if between is not None:
            between()
        self.engine.receive(self.tensors[half:])
        self.engine.end_update()
        self.engine.handshake()  # waits for a server that holds it

    def pid(self, number: int = 0) -> int:
        server = self.sources[number].server
        assert server is not None
        return server.endpoint.pid

    def answers(self, fault: Callable[[], None] | None = None) -> dict[str, Trajectory]:
        """Sixteen long responses; `fault` happens after the second of them."""
        records: list[RolloutRecord] = []
        for record in self.engine.generate(make_requests(16, MAX_NEW_TOKENS, stop_ids=())):
            records.append(record)
            if len(records) == 2 and fault is not None:
                fault()
        assert Counter(record.rollout_id for record in records) == Counter(f"r{i}" for i in range(16))
        return {record.rollout_id: Trajectory(**record.values) for record in records}

    def wait_until_healthy(self) -> None:
        work = Work()
        while set(self.engine.states.values()) != {State.HEALTHY}:
            assert work.seconds() < sglang_live.START_SECONDS, self.engine.states
            time.sleep(0.2)


Start = Callable[[int], Own]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("other") / "hf", families.FAMILIES["qwen3_moe"], seed=1)


@pytest.fixture(scope="module")
def options(model_folder: Path, environment: Path) -> ServerOptions:
    return ServerOptions(
        model_folder, environment, device="cpu", dtype="float32", max_pool_tokens=8192, policy_version=-1
    )


@pytest.fixture(scope="module")
def start(options: ServerOptions, other_folder: Path, model: ModelFacts, tmp_path_factory) -> Iterator[Start]:
    """Starts so many servers, brings version 4 to them, and closes them after the last test."""
    engines: list[FleetEngine] = []

    def make(count: int) -> Own:
        made = Own(tmp_path_factory.mktemp("own"), options, model, other_folder, count)
        engines.append(made.engine)
        made.update(4)
        return made

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def own(start: Start) -> Own:
    """One server."""
    return start(1)


@pytest.fixture(scope="module")
def two(start: Start) -> Own:
    """Two servers."""
    return start(2)


@pytest.fixture(scope="module")
def undisturbed(own: Own) -> dict[str, Trajectory]:
    return own.answers()


def require_same(seen: dict[str, Trajectory], undisturbed: dict[str, Trajectory], folder: Path) -> None:
    """The same tokens, all of version 4, and routing, kept sets and log-probs of that version's weights."""
    reference = Reference(folder)
    for rollout_id, trajectory in seen.items():
        assert trajectory.token_ids.tolist() == undisturbed[rollout_id].token_ids.tolist()
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {4}
        reference.compare(trajectory)
    reference.require_parity()


def test_a_killed_server_is_started_again_with_the_current_weights(own: Own, undisturbed, other_folder: Path):
    pid = own.pid()
    seen = own.answers(lambda: os.killpg(pid, signal.SIGKILL))
    assert own.pid() != pid
    assert any(trajectory.attempt > 0 for trajectory in seen.values())
    assert "lost" in own.said[-2]
    assert "going on" in own.said[-1]
    require_same(seen, undisturbed, other_folder)


def test_a_server_that_hangs_is_replaced(own: Own, undisturbed, other_folder: Path):
    pid = own.pid()
    seen = own.answers(lambda: os.killpg(pid, signal.SIGSTOP))
    assert own.pid() != pid
    require_same(seen, undisturbed, other_folder)


def test_a_server_killed_before_an_update_gets_it_when_it_is_back(own: Own, undisturbed, other_folder: Path):
    pid = own.pid()
    os.killpg(pid, signal.SIGKILL)
    own.update(5)
    assert own.pid() != pid
    assert own.engine.handshake().policy_version == 5
    own.update(4)
    require_same(own.answers(), undisturbed, other_folder)


def test_a_server_killed_between_two_buckets_gets_the_whole_update_when_it_is_back(
    own: Own, undisturbed, other_folder: Path
):
    pid = own.pid()
    own.update(4, between=lambda: os.killpg(pid, signal.SIGKILL))
    assert own.pid() != pid
    assert any("bucket 1" in line for line in own.said)
    require_same(own.answers(), undisturbed, other_folder)


# --- two servers -----------------------------------------------------------------------------------------------------


def test_two_servers_answer_as_one(two: Own, undisturbed, other_folder: Path):
    seen = two.answers()
    assert {trajectory.engine_id for trajectory in seen.values()} == {"sglang-0", "sglang-1"}
    require_same(seen, undisturbed, other_folder)


def test_the_other_server_takes_over_what_a_killed_one_worked_on(two: Own, undisturbed, other_folder: Path):
    two.wait_until_healthy()
    pid = two.pid(0)
    require_same(two.answers(lambda: os.killpg(pid, signal.SIGKILL)), undisturbed, other_folder)
    two.wait_until_healthy()
    assert two.pid(0) != pid
    seen = two.answers()
    assert {trajectory.engine_id for trajectory in seen.values()} == {"sglang-0", "sglang-1"}
    require_same(seen, undisturbed, other_folder)


def test_an_update_reaches_the_rest_when_one_server_dies_between_two_buckets(two: Own, undisturbed, other_folder: Path):
    two.wait_until_healthy()
    pid = two.pid(1)
    two.update(4, between=lambda: os.killpg(pid, signal.SIGKILL))
    assert any("'sglang-1'" in line and "bucket 1" in line for line in two.said)
    # Training goes on with the rest, while the other is started again.
    assert two.engine.states["sglang-0"] is State.HEALTHY
    require_same(two.answers(), undisturbed, other_folder)
    two.wait_until_healthy()
    seen = two.answers()
    assert {trajectory.engine_id for trajectory in seen.values()} == {"sglang-0", "sglang-1"}
    require_same(seen, undisturbed, other_folder)


# --- standing still, and spoilt answers ------------------------------------------------------------------------------


def test_a_server_that_stands_still_for_half_a_minute_loses_nothing(
    server: SGLangServer, model: ModelFacts, model_folder: Path
):
    engine = sglang_live.connect(server.endpoint, model=model, max_running=8)
    requests = make_requests(16, MAX_NEW_TOKENS, stop_ids=())
    records = []
    for record in engine.generate(requests):
        if not records:
            os.killpg(server.endpoint.pid, signal.SIGSTOP)
            threading.Thread(target=_go_on_later, args=(server.endpoint.pid, 30.0)).start()
        records.append(record)
    engine.close()
    assert Counter(record.rollout_id for record in records) == Counter(r.lineage.rollout_id for r in requests)
    reference = Reference(model_folder)
    for record in records:
        # Connections may break meanwhile, and their requests are sent again: what counts is what comes of them.
        reference.compare(Trajectory(**record.values))
    reference.require_parity()


def _go_on_later(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    os.killpg(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def unspoilt(server: SGLangServer, model: ModelFacts) -> dict[str, Trajectory]:
    return _collect(server.endpoint, model)


@pytest.mark.parametrize("kind", sorted(SPOILERS))
def test_spoilt_answers_are_asked_for_again(
    kind: str, server: SGLangServer, unspoilt, model: ModelFacts, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backoff, "PAUSE_SECONDS", (0.0, 0.0, 0.0))
    with spoiling(server.endpoint, SPOILERS[kind]) as proxy:
        seen = _collect(proxy.endpoint, model)
    assert seen.keys() == unspoilt.keys()
    assert sum(trajectory.attempt for trajectory in seen.values()) > 0
    reference = Reference(model_folder)
    for rollout_id, trajectory in seen.items():
        assert trajectory.token_ids.tolist() == unspoilt[rollout_id].token_ids.tolist()
        reference.compare(trajectory)
    reference.require_parity()


def _collect(endpoint: Endpoint, model: ModelFacts) -> dict[str, Trajectory]:
    requests = make_requests(8, 12)
    # One after the other: which answer is spoilt does not depend on the scheduler.
    engine = sglang_live.connect(endpoint, model=model, max_running=1)
    records = list(engine.generate(requests))
    engine.close()
    assert len(records) == len(requests)
    return {record.rollout_id: Trajectory(**record.values) for record in records}
