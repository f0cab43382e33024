"""Servers that die, hang or answer badly while they are used: every rollout comes once, as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import families
import pytest
from moerl.rollout.sglang.supervised import SupervisedOptions, SupervisedSGLang
from safetensors.torch import load_file
from sglang_proxy import SPOILERS, spoiling
from sglang_reference import Reference, make_requests

from moerl.contract.ports import RolloutRecord
from moerl.contract.trajectory import Trajectory
from moerl.rollout.sglang import http
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.engine import ModelFacts, SGLangEngine
from moerl.rollout.sglang.server import ServerOptions, SGLangServer
from moerl.rollout.sglang.sources import OwnServer

pytestmark = pytest.mark.sglang

MAX_NEW_TOKENS = 96


class Supervised:
    """A managed server that starts with the weights of one folder and was brought to hold those of another."""

    def __init__(self, folder: Path, options: ServerOptions, model: ModelFacts, weights: Path) -> None:
        tensors = load_file(weights / "model.safetensors")
        self.said: list[str] = []
        self.source = OwnServer(options, folder, 200.0)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        supervised = SupervisedOptions("s0", "float32", 8, 6.0, 20.0, shapes, {}, self.said.append)
        self.engine = SupervisedSGLang(self.source, model, supervised, -1)
        self.update = lambda version: self._send(version, tensors)

    def _send(self, version: int, tensors) -> None:
        self.engine.begin_update(version)
        self.engine.receive(tensors.items())
        self.engine.end_update()

    @property
    def pid(self) -> int:
        assert self.source.server is not None
        return self.source.server.endpoint.pid

    def answers(self, fault: Callable[[], None] | None = None) -> dict[str, Trajectory]:
        """Sixteen long responses; `fault` happens after the second of them."""
        records: list[RolloutRecord] = []
        for record in self.engine.generate(make_requests(16, MAX_NEW_TOKENS, stop_ids=())):
            records.append(record)
            if len(records) == 2 and fault is not None:
                fault()
        assert Counter(record.rollout_id for record in records) == Counter(f"r{i}" for i in range(16))
        return {record.rollout_id: Trajectory(**record.values) for record in records}


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("other") / "hf", families.FAMILIES["qwen3_moe"], seed=1)


@pytest.fixture(scope="module")
def supervised(
    model_folder: Path, other_folder: Path, environment: Path, model: ModelFacts, tmp_path_factory
) -> Iterator[Supervised]:
    options = ServerOptions(
        model_folder, environment, device="cpu", dtype="float32", max_pool_tokens=8192, policy_version=-1
    )
    made = Supervised(tmp_path_factory.mktemp("supervised"), options, model, other_folder)
    made.update(4)
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def undisturbed(supervised: Supervised) -> dict[str, Trajectory]:
    return supervised.answers()


def require_same(seen: dict[str, Trajectory], undisturbed: dict[str, Trajectory], folder: Path) -> None:
    """The same tokens, all of version 4, and routing, kept sets and log-probs of that version's weights."""
    reference = Reference(folder)
    for rollout_id, trajectory in seen.items():
        assert trajectory.token_ids.tolist() == undisturbed[rollout_id].token_ids.tolist()
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {4}
        reference.compare(trajectory)
    reference.require_parity()


def test_a_killed_server_is_started_again_with_the_current_weights(supervised, undisturbed, other_folder: Path):
    pid = supervised.pid
    seen = supervised.answers(lambda: os.killpg(pid, signal.SIGKILL))
    assert supervised.pid != pid
    assert any(trajectory.attempt >= http.NUM_ATTEMPTS for trajectory in seen.values())
    assert "lost" in supervised.said[-2]
    assert "version 4" in supervised.said[-1]
    require_same(seen, undisturbed, other_folder)


def test_a_server_that_hangs_is_replaced(supervised, undisturbed, other_folder: Path):
    pid = supervised.pid
    seen = supervised.answers(lambda: os.killpg(pid, signal.SIGSTOP))
    assert supervised.pid != pid
    require_same(seen, undisturbed, other_folder)


def test_a_server_killed_before_an_update_gets_it_when_it_is_back(supervised, undisturbed, other_folder: Path):
    pid = supervised.pid
    os.killpg(pid, signal.SIGKILL)
    supervised.update(5)
    assert supervised.pid != pid
    assert supervised.engine.handshake().policy_version == 5
    supervised.update(4)
    require_same(supervised.answers(), undisturbed, other_folder)


def test_a_server_that_stands_still_for_half_a_minute_loses_nothing(
    server: SGLangServer, model: ModelFacts, model_folder: Path
):
    engine = SGLangEngine(server.endpoint, model, engine_id="s1", max_running=8, timeout_seconds=120.0)
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
    monkeypatch.setattr(http, "_BACKOFF_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 500_000)
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
    engine = SGLangEngine(endpoint, model, engine_id="s2", max_running=1, timeout_seconds=60.0)
    records = list(engine.generate(requests))
    engine.close()
    assert len(records) == len(requests)
    return {record.rollout_id: Trajectory(**record.values) for record in records}
