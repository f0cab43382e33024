"""Servers that fail and are replaced, alone and beside others; live ones are in `tests/sglang`."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

import pytest
from fleet_fake import FakeLauncher, FakeServer, hang_up, make_requests
from waiting import eventually

from moerl.contract.trajectory import Trajectory
from moerl.errors import EngineError
from moerl.rollout.fleet.backend import Attempt, AttemptReply
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.fleet import MAX_LOSSES
from moerl.rollout.fleet.replica import StaleServerError

requests = partial(make_requests, group_size=2)


def answers(engine: FleetEngine, count: int) -> dict[str, Trajectory]:
    """Each rollout once."""
    records = list(engine.generate(requests(count)))
    assert Counter(record.rollout_id for record in records) == Counter(f"r{i}" for i in range(count))
    return {record.rollout_id: Trajectory(**record.values) for record in records}


def dies_after(server: FakeServer, count: int) -> None:
    """The server answers `count` requests and hangs up on all others, probes too."""

    def answer(attempt: Attempt) -> AttemptReply:
        if len(server.attempts) <= count:
            return server.good(attempt)
        server.answers_probes = False
        return hang_up(attempt)

    server.answer = answer


def hangs_after(server: FakeServer, count: int, release: threading.Event) -> None:
    """The server answers `count` requests and is silent on all others, but for probes where it answers them."""

    def answer(attempt: Attempt) -> AttemptReply:
        if len(server.attempts) > count:
            release.wait(30.0)
        return server.good(attempt)

    server.answer = answer


# --- one server ------------------------------------------------------------------------------------------------------


def test_rollouts_of_a_lost_server_are_asked_of_the_next_under_their_ids(servers, engine_on, said: list[str]):
    dies_after(servers[0], 5)
    launcher = FakeLauncher(*servers)
    seen = answers(engine_on(launcher), 12)
    asked_again = set(servers[1].asked)
    assert 7 <= len(asked_again) < 12
    assert {name for name, trajectory in seen.items() if trajectory.attempt > 0} <= asked_again
    assert launcher.num_opened == 2
    assert "lost" in said[0]
    assert "going on" in said[1]


def test_a_server_with_other_keys_is_asked_for_anew(servers, engine_on):
    engine = engine_on(FakeLauncher(*servers))
    servers[0].key = "changed"
    answers(engine, 3)
    assert servers[0].attempts == []


def test_a_server_that_was_given_other_weights_serves_nothing(servers, engine_on):
    engine = engine_on(FakeLauncher(*servers))
    for server in servers:
        server.weight_version = 2
    with pytest.raises(StaleServerError, match="policy version 2"):
        list(engine.generate(requests(3)))
    assert all(server.attempts == [] for server in servers)


def test_an_answer_of_older_weights_is_not_taken(servers, engine_on):
    # Its label says 4, its tokens say 3: somebody put other weights into it while it was asked.
    for server in servers[:2]:
        server.weight_version, server.token_version = 4, 3
    engine = engine_on(FakeLauncher(*servers), version=4)
    with pytest.raises(StaleServerError):
        list(engine.generate(requests(1)))


def test_the_call_ends_when_no_server_answers_anything(servers, engine_on):
    for server in servers:
        dies_after(server, 0)
        server.answers_probes = False
    launcher = FakeLauncher(*servers)
    with pytest.raises(EngineError, match="fake: "):
        list(engine_on(launcher).generate(requests(2)))
    assert launcher.num_opened == 1 + MAX_LOSSES
    assert launcher.is_closed


def test_answers_in_between_start_the_count_of_losses_again(servers, engine_on):
    launcher, server = FakeLauncher(servers[0]), servers[0]
    server.answers_probes = False
    # One answer, then hanging up on the next request.
    server.answer = lambda attempt: (server.good if len(server.attempts) % 2 == 1 else hang_up)(attempt)
    answers(engine_on(launcher, max_running=1), 8)
    assert launcher.num_opened == 8 > 1 + MAX_LOSSES


def test_a_server_that_stumbles_and_answers_again_is_kept(servers, engine_on):
    launcher, server = FakeLauncher(servers[0]), servers[0]
    server.answer = lambda attempt: (server.good if len(server.attempts) != 3 else hang_up)(attempt)
    engine = engine_on(launcher)
    answers(engine, 8)
    assert launcher.num_opened == 1
    eventually(lambda: engine.states == {"e-0": "healthy"})


def test_a_server_that_answers_probes_and_no_requests_is_lost(servers, engine_on):
    server = servers[0]
    server.answer = lambda attempt: (server.good if len(server.attempts) <= 2 else hang_up)(attempt)
    launcher = FakeLauncher(*servers)
    answers(engine_on(launcher), 8)
    assert launcher.num_opened == 2


def test_a_server_that_falls_silent_is_lost_before_a_response_is_overdue(servers, engine_on):
    release = threading.Event()
    hangs_after(servers[0], 2, release)
    servers[0].answers_probes = False
    launcher = FakeLauncher(*servers)
    answers(engine_on(launcher, response_seconds=1000.0, probe_seconds=0.3), 8)
    release.set()
    assert launcher.num_opened == 2


def test_nothing_is_sampled_before_the_first_weights(servers, engine_on):
    servers[0].weight_version = -1
    engine = engine_on(servers[0], version=-1)
    assert engine.handshake().policy_version == -1
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(requests(1))


def test_an_aborted_rollout_is_not_asked_of_the_next_server(servers, engine_on):
    engine = engine_on(FakeLauncher(*servers))

    def abort_and_die(attempt: Attempt) -> AttemptReply:
        for call in engine._calls.values():
            call.rollouts["r0"].is_aborted = True
        servers[0].answers_probes = False
        return hang_up(attempt)

    servers[0].answer = abort_and_die
    assert list(engine.generate(requests(1))) == []
    assert engine.unfinished == ["r0"]
    assert servers[1].attempts == []


def test_a_server_that_the_backend_refuses_is_left(servers, engine_on):
    launcher, servers[0].refusal = FakeLauncher(servers[0]), EngineError("of another precision")
    with pytest.raises(EngineError, match="precision"):
        engine_on(launcher)
    assert launcher.is_closed


def test_a_request_that_brings_servers_down_ends_the_call_and_is_named_unfinished(servers, engine_on):
    for server in servers:
        server.answer = lambda attempt, server=server: (
            hang_up if attempt.request.lineage.rollout_id == "r1" else server.good
        )(attempt)
    engine = engine_on(FakeLauncher(servers[0]), FakeLauncher(servers[1]))
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
    eventually(lambda: len(servers[0].attempts) + len(servers[1].attempts) == 12)
    release.set()
    thread.join()
    groups = [{attempt.request.lineage.group_id for attempt in server.attempts} for server in servers[:2]]
    assert groups[0].isdisjoint(groups[1])
    assert min(len(server.attempts) for server in servers[:2]) >= 4


def test_what_a_lost_server_worked_on_is_asked_of_the_others_at_once(servers, engine_on):
    dies_after(servers[0], 1)
    launcher = FakeLauncher(servers[0], servers[2])
    engine = engine_on(launcher, servers[1])
    seen = answers(engine, 16)
    assert {trajectory.engine_id for trajectory in seen.values()} >= {"e-0", "e-1"}
    eventually(lambda: engine.states["e-0"] == "healthy")
    assert launcher.num_opened == 2


def test_a_silent_server_holds_up_nothing_but_what_it_worked_on(servers, engine_on):
    release = threading.Event()
    hangs_after(servers[0], 0, release)
    servers[0].answers_probes = False
    launcher = FakeLauncher(servers[0], servers[2])
    engine = engine_on(launcher, servers[1], response_seconds=1000.0, probe_seconds=0.3)
    answers(engine, 16)
    release.set()


def test_the_rest_goes_on_without_a_server_that_is_given_up(servers, engine_on, said: list[str]):
    dies_after(servers[0], 0)
    servers[0].answers_probes = False
    engine = engine_on(FakeLauncher(servers[0]), servers[1])
    seen = answers(engine, 12)
    assert {trajectory.engine_id for trajectory in seen.values()} == {"e-1"}
    eventually(lambda: len(answers(engine, 8)) == 8 and engine.states == {"e-0": "dead", "e-1": "healthy"})
    assert "given up" in said[-1]
    assert len(answers(engine, 4)) == 4


def test_an_engine_with_one_bad_server_does_not_start(servers, engine_on):
    launchers = [FakeLauncher(servers[0]), FakeLauncher(servers[1])]
    servers[1].refusal = EngineError("of another precision")
    with pytest.raises(EngineError, match="precision"):
        engine_on(*launchers)
    assert all(launcher.is_closed for launcher in launchers)
