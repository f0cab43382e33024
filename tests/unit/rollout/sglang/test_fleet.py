"""Servers that fail and are replaced, alone and beside others; live ones are in `tests/sglang`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sglang_fake import FakeServer, FakeSource
from waiting import eventually

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.errors import EngineError
from moerl.rollout.sglang import http
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.engine import SGLangEngine
from moerl.rollout.sglang.fleet import MAX_LOSSES
from moerl.rollout.sglang.member import StaleServerError


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    monkeypatch.setattr(http, "_BACKOFF_SECONDS", (0.0, 0.0, 0.0))
    made = [FakeServer() for _ in range(3)]
    yield made
    for server in made:
        server.close()


def requests(count: int) -> list[RolloutRequest]:
    sampling = SamplingParams(top_p=0.9, seed=5)
    return [RolloutRequest(Lineage(f"r{i}", "p", f"g{i // 2}"), (1, 2, 3), sampling, 4, (0,)) for i in range(count)]


def answers(engine: SGLangEngine, count: int) -> dict[str, Trajectory]:
    """Each rollout once."""
    records = list(engine.generate(requests(count)))
    assert Counter(record.rollout_id for record in records) == Counter(f"r{i}" for i in range(count))
    return {record.rollout_id: Trajectory(**record.values) for record in records}


def dies_after(server: FakeServer, count: int) -> None:
    """The server answers `count` requests and hangs up on all others, probes too."""
    good = server.answer

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        if len(server.bodies) <= count:
            return good(body)
        server.answers_probes = False
        return 0, b""

    server.answer = answer


def hangs_after(server: FakeServer, count: int, release: threading.Event) -> None:
    """The server answers `count` requests and is silent on all others, but for probes where it answers them."""
    good = server.answer

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        if len(server.bodies) > count:
            release.wait(30.0)
        return good(body)

    server.answer = answer


# --- one server ------------------------------------------------------------------------------------------------------


def test_rollouts_of_a_lost_server_are_asked_of_the_next_under_their_ids(servers, engine_on, said: list[str]):
    dies_after(servers[0], 5)
    source = FakeSource(*servers)
    seen = answers(engine_on(source), 12)
    asked_again = {body["rid"].partition("-")[2] for body in servers[1].bodies}
    assert 7 <= len(asked_again) < 12
    assert {name for name, trajectory in seen.items() if trajectory.attempt > 0} <= asked_again
    assert source.num_opened == 2
    assert "lost" in said[0]
    assert "going on" in said[1]


def test_a_server_with_other_keys_is_asked_for_anew(servers, engine_on):
    engine = engine_on(FakeSource(*servers))
    servers[0].endpoint = Endpoint(servers[0].endpoint.url, "changed", "changed")
    answers(engine, 3)
    assert servers[0].bodies == []


def test_a_server_that_was_given_other_weights_serves_nothing(servers, engine_on):
    engine = engine_on(FakeSource(*servers))
    for server in servers:
        server.weight_version = "2"
    with pytest.raises(StaleServerError, match="policy version 2"):
        list(engine.generate(requests(3)))
    assert all(server.bodies == [] for server in servers)


def test_an_answer_of_older_weights_is_not_taken(servers, engine_on):
    # Its label says 4, its tokens say 3: somebody put other weights into it while it was asked.
    servers[0].weight_version = servers[1].weight_version = "4"
    engine = engine_on(FakeSource(*servers), version=4)
    with pytest.raises(StaleServerError):
        list(engine.generate(requests(1)))


def test_the_call_ends_when_no_server_answers_anything(servers, engine_on):
    for server in servers:
        dies_after(server, 0)
        server.answers_probes = False
    source = FakeSource(*servers)
    with pytest.raises(EngineError, match="connection failed"):
        list(engine_on(source).generate(requests(2)))
    assert source.num_opened == 1 + MAX_LOSSES
    assert source.is_closed


def test_answers_in_between_start_the_count_of_losses_again(servers, engine_on):
    source, server = FakeSource(servers[0]), servers[0]
    server.answers_probes = False
    good = server.answer
    # One answer, then hanging up on the next request.
    server.answer = lambda body: good(body) if len(server.bodies) % 2 == 1 else (0, b"")
    answers(engine_on(source, max_running=1), 8)
    assert source.num_opened == 8 > 1 + MAX_LOSSES


def test_a_server_that_stumbles_and_answers_again_is_kept(servers, engine_on):
    source, server = FakeSource(servers[0]), servers[0]
    good = server.answer
    server.answer = lambda body: good(body) if len(server.bodies) != 3 else (0, b"")
    engine = engine_on(source)
    answers(engine, 8)
    assert source.num_opened == 1
    eventually(lambda: engine.states == {"e-0": "healthy"})


def test_a_server_that_answers_probes_and_no_requests_is_lost(servers, engine_on):
    server = servers[0]
    good = server.answer
    server.answer = lambda body: good(body) if len(server.bodies) <= 2 else (0, b"")
    source = FakeSource(*servers)
    answers(engine_on(source), 8)
    assert source.num_opened == 2


def test_a_server_that_falls_silent_is_lost_before_a_response_is_overdue(servers, engine_on):
    release = threading.Event()
    hangs_after(servers[0], 2, release)
    servers[0].answers_probes = False
    source = FakeSource(*servers)
    answers(engine_on(source, response_seconds=1000.0, probe_seconds=0.3), 8)
    release.set()
    assert source.num_opened == 2


def test_nothing_is_sampled_before_the_first_weights(servers, engine_on):
    servers[0].weight_version = "none"
    engine = engine_on(servers[0], version=-1)
    assert engine.handshake().policy_version == -1
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(requests(1))


def test_an_aborted_rollout_is_not_asked_of_the_next_server(servers, engine_on):
    engine = engine_on(FakeSource(*servers))

    def abort_and_die(body: dict[str, Any]) -> tuple[int, bytes]:
        engine._run.rollouts["r0"].is_aborted = True
        servers[0].answers_probes = False
        return 0, b""

    servers[0].answer = abort_and_die
    assert list(engine.generate(requests(1))) == []
    assert engine.unfinished == ["r0"]
    assert servers[1].bodies == []


def test_a_server_of_another_precision_is_refused_and_left(servers, engine_on):
    source = FakeSource(servers[0])
    with pytest.raises(EngineError, match="precision"):
        engine_on(source, dtype="bfloat16")
    assert source.is_closed


def test_a_request_that_brings_servers_down_ends_the_call_and_is_named_unfinished(servers, engine_on):
    for server in servers:
        good = server.answer
        server.answer = lambda body, good=good: (0, b"") if body["rid"].endswith("-r1") else good(body)
    engine = engine_on(FakeSource(servers[0]), FakeSource(servers[1]))
    with pytest.raises(EngineError, match="connection failed"):
        list(engine.generate(requests(6)))
    assert engine.unfinished == ["r1"]


# --- several servers -------------------------------------------------------------------------------------------------


def test_two_servers_share_the_work_and_a_group_stays_together(servers, engine_on):
    release = threading.Event()
    for server in servers[:2]:
        hangs_after(server, 0, release)
    engine = engine_on(servers[0], servers[1], max_running=8)
    thread = threading.Thread(target=lambda: answers(engine, 12))
    thread.start()
    eventually(lambda: len(servers[0].bodies) + len(servers[1].bodies) == 12)
    release.set()
    thread.join()
    groups = [{int(body["rid"].partition("-r")[2]) // 2 for body in server.bodies} for server in servers[:2]]
    assert groups[0].isdisjoint(groups[1])
    assert min(len(server.bodies) for server in servers[:2]) >= 4


def test_what_a_lost_server_worked_on_is_asked_of_the_others_at_once(servers, engine_on):
    dies_after(servers[0], 1)
    source = FakeSource(servers[0], servers[2])
    engine = engine_on(source, servers[1])
    seen = answers(engine, 16)
    assert {trajectory.engine_id for trajectory in seen.values()} >= {"e-0", "e-1"}
    eventually(lambda: engine.states["e-0"] == "healthy")
    assert source.num_opened == 2


def test_a_silent_server_holds_up_nothing_but_what_it_worked_on(servers, engine_on):
    release = threading.Event()
    hangs_after(servers[0], 0, release)
    servers[0].answers_probes = False
    source = FakeSource(servers[0], servers[2])
    engine = engine_on(source, servers[1], response_seconds=1000.0, probe_seconds=0.3)
    answers(engine, 16)
    release.set()


def test_the_rest_goes_on_without_a_server_that_is_given_up(servers, engine_on, said: list[str]):
    dies_after(servers[0], 0)
    servers[0].answers_probes = False
    engine = engine_on(FakeSource(servers[0]), servers[1])
    seen = answers(engine, 12)
    assert {trajectory.engine_id for trajectory in seen.values()} == {"e-1"}
    eventually(lambda: len(answers(engine, 8)) == 8 and engine.states == {"e-0": "dead", "e-1": "healthy"})
    assert "given up" in said[-1]
    assert len(answers(engine, 4)) == 4


def test_an_engine_with_one_bad_server_does_not_start(servers, engine_on):
    sources = [FakeSource(servers[0]), FakeSource(servers[1])]
    servers[1].info["dtype"] = "bfloat16"
    with pytest.raises(EngineError, match="precision"):
        engine_on(*sources)
    assert all(source.is_closed for source in sources)
