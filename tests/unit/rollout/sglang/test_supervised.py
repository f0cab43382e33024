"""Servers that fail and are replaced; live ones are in `tests/sglang/test_faults.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from sglang_fake import MOE_LAYERS, SPEC, FakeServer

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.errors import EngineError
from moerl.rollout.sglang import http
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.engine import ModelFacts
from moerl.rollout.sglang.supervised import MAX_LOSSES, StaleServerError, SupervisedOptions, SupervisedSGLang


class Source:
    """Gives fake servers, one after the other; the last one for ever."""

    def __init__(self, servers: list[FakeServer]) -> None:
        self.servers, self.num_opened, self.is_closed = servers, 0, False

    def open(self) -> Endpoint:
        self.num_opened += 1
        return self.servers[min(self.num_opened, len(self.servers)) - 1].endpoint

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    monkeypatch.setattr(http, "_BACKOFF_SECONDS", (0.0, 0.0, 0.0))
    made = [FakeServer(), FakeServer()]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervise(said: list[str]) -> Iterator:
    engines: list[SupervisedSGLang] = []

    def make(source: Source, version: int = 3, dtype: str = "float32", max_running: int = 4) -> SupervisedSGLang:
        options = SupervisedOptions("e0", dtype, max_running, 30.0, 5.0, {}, {}, said.append)
        engines.append(SupervisedSGLang(source, ModelFacts(SPEC, MOE_LAYERS), options, version))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def requests(count: int) -> list[RolloutRequest]:
    sampling = SamplingParams(top_p=0.9, seed=5)
    return [RolloutRequest(Lineage(f"r{i}", "p", "g"), (1, 2, 3), sampling, 4, (0,)) for i in range(count)]


def dies_after(server: FakeServer, count: int) -> None:
    """The server answers `count` requests and hangs up on all others."""
    good = server.answer
    server.answer = lambda body: good(body) if len(server.bodies) <= count else (0, b"")


def test_rollouts_of_a_lost_server_are_asked_of_the_next_under_their_ids(servers, supervise, said):
    dies_after(servers[0], 5)
    source = Source(servers)
    records = list(supervise(source).generate(requests(12)))
    assert Counter(record.rollout_id for record in records) == Counter(f"r{i}" for i in range(12))
    attempts = {record.rollout_id: Trajectory(**record.values).attempt for record in records}
    asked_again = {body["rid"].partition("-")[2] for body in servers[1].bodies}
    assert 7 <= len(asked_again) < 12
    assert asked_again == {name for name, attempt in attempts.items() if attempt >= http.NUM_ATTEMPTS}
    assert source.num_opened == 2
    assert "lost" in said[0]


def test_a_server_with_other_keys_is_asked_for_anew(servers, supervise):
    engine = supervise(Source(servers))
    servers[0].endpoint = Endpoint(servers[0].endpoint.url, "changed", "changed")
    assert len(list(engine.generate(requests(3)))) == 3
    assert servers[0].bodies == []


def test_a_server_with_other_weights_serves_nothing(servers, supervise):
    engine = supervise(Source(servers))
    servers[0].weight_version = servers[1].weight_version = "2"
    with pytest.raises(StaleServerError, match="policy version 2"):
        list(engine.generate(requests(3)))
    assert servers[0].bodies == servers[1].bodies == []


def test_the_run_ends_when_no_server_answers_anything(servers, supervise, said):
    for server in servers:
        dies_after(server, 0)
    source = Source(servers)
    with pytest.raises(EngineError, match="connection failed"):
        list(supervise(source).generate(requests(2)))
    assert source.num_opened == 1 + MAX_LOSSES


def test_answers_in_between_start_the_count_of_losses_again(servers, supervise):
    source, server = Source(servers[:1]), servers[0]
    good = server.answer
    # One answer, then hanging up for all attempts of the next request.
    server.answer = lambda body: good(body) if len(server.bodies) % (1 + http.NUM_ATTEMPTS) == 1 else (0, b"")
    assert len(list(supervise(source, max_running=1).generate(requests(8)))) == 8
    assert source.num_opened == 8 > 1 + MAX_LOSSES


def test_nothing_is_sampled_before_the_first_weights(servers, supervise):
    servers[0].weight_version = "none"
    engine = supervise(Source(servers), version=-1)
    assert engine.handshake().policy_version == -1
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(requests(1))


def test_an_aborted_rollout_is_not_asked_of_the_next_server(servers, supervise):
    engine = supervise(Source(servers))
    iterator = engine.generate(requests(1))

    def abort_and_die(body):
        engine._aborted.add("r0")
        return 0, b""

    servers[0].answer = abort_and_die
    assert list(iterator) == []
    assert servers[1].bodies == []


def test_a_server_of_another_precision_is_refused_and_left(servers, supervise):
    source = Source(servers)
    with pytest.raises(EngineError, match="precision"):
        supervise(source, dtype="bfloat16")
    assert source.is_closed
