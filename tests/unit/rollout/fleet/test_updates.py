"""Weight updates of servers that fail, come late, or are still being started; live ones are in `tests/sglang`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import full_updates
import pytest
import torch
from fleet_fake import FakeLauncher, FakeServer, fall_asleep_behind_a_call, hang_up, make_requests, reply
from waiting import eventually

from moerl.contract.ports import RolloutRecord
from moerl.contract.trajectory import Trajectory
from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Attempt, AttemptReply
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.options import Interrupt

TENSORS = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.fixture
def engine_on(engine_on: Callable[..., FleetEngine]) -> Callable[..., FleetEngine]:
    return partial(engine_on, shapes=SHAPES)


def send(engine: FleetEngine, version: int, value: float = 0.0) -> None:
    """In two buckets."""
    engine.begin_update(full_updates.full(version, TENSORS))
    for name, tensor in TENSORS.items():
        engine.receive([(name, tensor + value)])
    engine.end_update()


def slow(server: FakeServer, step: str) -> tuple[threading.Event, threading.Event]:
    """The step waits on this server; events: it has begun, it may go on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(20.0)

    server.before[step] = wait
    return begun, go_on


def value(server: FakeServer) -> float:
    return float(server.held["a"][0, 0])


def answers(engine: FleetEngine, count: int = 4) -> set[str]:
    records = list(engine.generate(make_requests(count)))
    assert sorted(record.rollout_id for record in records) == sorted(f"r{i}" for i in range(count))
    assert all(record.refusal is None for record in records)
    return {record.engine_id for record in records}


@pytest.mark.parametrize("step", ["begin", "bucket 0", "bucket 1", "end"])
@pytest.mark.parametrize("error", [None, RuntimeError("of a process group"), OSError("no port")])
def test_a_server_that_fails_in_an_update_is_replaced_while_the_other_has_it(
    step: str, error: Exception | None, servers, engine_on, said: list[str]
):
    engine = engine_on(FakeLauncher(servers[0], servers[2]), servers[1], version=-1)
    servers[0].fail(step, error)
    send(engine, 3, 7.0)
    assert value(servers[1]) == 7.0
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert value(servers[2]) == 7.0
    assert "lost" in said[0]
    assert answers(engine, 8) == {"e-0", "e-1"}


def test_a_server_that_comes_late_gets_everything_before_requests(servers, engine_on):
    engine = engine_on(FakeLauncher(servers[0], servers[2]), servers[1], version=-1)
    servers[0].fail("begin")
    begun, go_on = slow(servers[2], "bucket 0")
    send(engine, 3)
    assert begun.wait(20.0)
    for _ in range(5):  # calls meanwhile leave it alone
        assert answers(engine) == {"e-1"}
    assert engine.states["e-0"] == "stale"
    go_on.set()
    eventually(lambda: engine.states["e-0"] == "healthy")
    assert servers[2].weight_version == 3


def test_an_update_waits_for_a_server_that_is_being_brought_up_and_then_includes_it(servers, engine_on):
    engine = engine_on(FakeLauncher(servers[0], servers[2]), servers[1], version=-1)
    servers[0].fail("begin")
    begun, go_on = slow(servers[2], "bucket 0")
    send(engine, 3, 1.0)
    assert begun.wait(20.0)
    update = threading.Thread(target=send, args=(engine, 4, 2.0))
    update.start()
    time.sleep(0.1)
    go_on.set()
    update.join(20.0)
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert (value(servers[1]), value(servers[2])) == (2.0, 2.0)
    assert (servers[1].weight_version, servers[2].weight_version) == (4, 4)


@pytest.mark.parametrize("interrupt", list(Interrupt))
def test_an_abandoned_update_is_undone_and_sampling_goes_on(interrupt: Interrupt, servers, engine_on):
    engine = engine_on(servers[0], servers[1], version=-1, interrupt=interrupt)
    send(engine, 3, 1.0)
    engine.begin_update(full_updates.full(4, TENSORS))
    engine.receive([("a", TENSORS["a"] + 9.0)])
    engine.abandon_update()
    assert (value(servers[0]), value(servers[1])) == (1.0, 1.0)
    assert engine.handshake().policy_version == 3
    assert answers(engine, 8) == {"e-0", "e-1"}


def test_a_sender_may_leave_after_the_engine_was_closed(servers, engine_on):
    engine = engine_on(servers[0], version=-1)
    send(engine, 3)
    engine.close()
    engine.abandon_update()
    assert servers[0].weight_version == 3


def test_a_call_waits_for_an_update_that_is_under_way(servers, engine_on):
    engine = engine_on(servers[0], version=-1)
    send(engine, 3)
    engine.begin_update(full_updates.full(3, TENSORS))
    done: list[set[str]] = []
    call = threading.Thread(target=lambda: done.append(answers(engine)))
    call.start()
    time.sleep(0.2)
    assert servers[0].attempts == []
    for name, tensor in TENSORS.items():
        engine.receive([(name, tensor)])
    engine.end_update()
    call.join(20.0)
    assert done == [{"e-0"}]


def test_drain_waits_for_responses_and_keeps_new_requests_back(servers, engine_on):
    engine = engine_on(servers[0], version=-1, interrupt=Interrupt.DRAIN)
    send(engine, 3)
    call, records, release = sampling(engine, servers[0])
    update = threading.Thread(target=send, args=(engine, 4))
    update.start()
    time.sleep(0.2)
    assert servers[0].weight_version == 3
    release.set()
    update.join(20.0)
    call.join(20.0)
    assert servers[0].aborted == []
    assert versions(records) == [{3}]
    assert (engine.costs.interrupted, engine.costs.recomputed_tokens) == (1, 0)


def test_abort_resume_cuts_responses_short_and_asks_for_the_rest_with_the_new_weights(servers, engine_on):
    engine = engine_on(servers[0], version=-1, interrupt=Interrupt.ABORT_RESUME)
    send(engine, 3)
    call, records, release = sampling(engine, servers[0], tokens_when_aborted=1)
    send(engine, 4)
    release.set()
    call.join(20.0)
    assert len(servers[0].aborted) >= 1
    assert [attempt.sampled_ids for attempt in servers[0].attempts] == [(), (1,)]
    assert versions(records) == [{3, 4}]
    assert (engine.costs.interrupted, engine.costs.recomputed_tokens) == (1, 4)


def test_a_request_that_is_asked_before_its_call_returns_to_its_thread_is_cut_short_too(
    servers, engine_on, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_on(servers[0], version=-1, interrupt=Interrupt.ABORT_RESUME)
    send(engine, 3)
    go_on = fall_asleep_behind_a_call(monkeypatch)
    call, records, release = sampling(engine, servers[0], tokens_when_aborted=1)
    update = threading.Thread(target=send, args=(engine, 4))
    update.start()
    eventually(lambda: len(servers[0].aborted) >= 1)
    update.join(20.0)
    go_on.set()
    release.set()
    call.join(20.0)
    assert versions(records) == [{3, 4}]


def test_retract_leaves_responses_to_the_server(servers, engine_on):
    engine = engine_on(servers[0], version=-1, interrupt=Interrupt.RETRACT)
    send(engine, 3)
    call, records, release = sampling(engine, servers[0])
    send(engine, 4)
    assert records == []
    release.set()
    call.join(20.0)
    assert servers[0].aborted == []
    assert len(servers[0].attempts) == len(records) == 1


def sampling(
    engine: FleetEngine, server: FakeServer, tokens_when_aborted: int | None = None
) -> tuple[threading.Thread, list[RolloutRecord], threading.Event]:
    """A call of one rollout that the server works on until it is released, or told to abort it."""
    release, records = threading.Event(), []

    def answer(attempt: Attempt) -> AttemptReply:
        version = server.weight_version
        while not release.wait(0.01):
            if tokens_when_aborted is not None and attempt.request_id in server.aborted:
                return reply(attempt, version, tokens_when_aborted)
        return server.good(attempt)

    server.answer = answer
    call = threading.Thread(target=lambda: records.extend(engine.generate(make_requests(1))))
    call.start()
    eventually(lambda: len(server.attempts) == 1)
    return call, records, release


def versions(records: list[RolloutRecord]) -> list[set[int]]:
    """Returns the policy versions of the sampled tokens of each record."""
    made = [Trajectory(**record.values) for record in records]
    return [set(trajectory.policy_versions[trajectory.sampled].tolist()) for trajectory in made]


def test_a_server_that_dies_while_responses_are_cut_short_does_not_hold_up_the_update(servers, engine_on):
    hang = threading.Event()
    engine = engine_on(
        FakeLauncher(servers[0], servers[2]), servers[1], version=-1, interrupt=Interrupt.ABORT_RESUME, max_running=2
    )
    send(engine, 3)

    def die(attempt: Attempt) -> AttemptReply:
        hang.wait(20.0)
        return hang_up(attempt)

    servers[0].answer, servers[0].answers_probes = die, False
    servers[0].answers_aborts = False
    records: list[Any] = []
    call = threading.Thread(target=lambda: records.extend(engine.generate(make_requests(8))))
    call.start()
    eventually(lambda: len(servers[0].attempts) > 0)
    threading.Timer(0.5, hang.set).start()
    send(engine, 3, 2.0)
    call.join(20.0)
    assert len(records) == 8


def test_what_a_server_holds_is_compared_and_sent_again(servers, engine_on, said: list[str]):
    engine = engine_on(servers[0], servers[1], version=-1)
    said_once = iter([{"a": 1, "b": 3}])
    servers[0].digests = lambda: next(said_once, {"a": 1, "b": 2})  # what it was sent the second time
    servers[1].digests = lambda: {"a": 1, "b": 2}
    send(engine, 3)
    engine.verify({"a": 1, "b": 2})
    assert "does not hold what was sent: 'b'" in said[0]
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert servers[0].steps.count("bucket 0") == 2 * servers[1].steps.count("bucket 0")
    assert answers(engine, 8) == {"e-0", "e-1"}


def test_a_server_that_still_holds_something_else_is_replaced(servers, engine_on):
    launcher = FakeLauncher(servers[0], servers[1])
    engine = engine_on(launcher, version=-1)
    servers[0].digests, servers[1].digests = (lambda: {"a": 2, "b": 2}), (lambda: {"a": 1, "b": 2})
    send(engine, 3)
    engine.verify({"a": 1, "b": 2})
    assert answers(engine) == {"e-0"}
    assert launcher.num_opened == 2
    assert servers[0].attempts == []


def test_a_tensor_without_a_checksum_is_refused(servers, engine_on):
    engine = engine_on(servers[0], version=-1)
    send(engine, 3)
    with pytest.raises(WeightSyncError, match=r"without a checksum.*'b'"):
        engine.verify({"a": 1})


def test_buckets_of_the_trainer_are_sent_as_they_come_and_larger_ones_in_pieces(servers, engine_on):
    engine = engine_on(servers[0], version=-1, bucket_bytes=40)  # a and b take 24 and 16 bytes
    full_updates.send(engine, 3, TENSORS)
    assert [step for step in servers[0].steps if "bucket" in step] == ["bucket 0"]
    small = engine_on(servers[1], version=-1, bucket_bytes=39)
    full_updates.send(small, 3, TENSORS)
    assert [step for step in servers[1].steps if "bucket" in step] == ["bucket 0", "bucket 1"]


def test_an_update_with_another_list_is_refused_before_servers_know_of_it(servers, engine_on):
    engine = engine_on(servers[0], version=-1)
    send(engine, 3)
    servers[0].steps.clear()
    with pytest.raises(WeightSyncError, match=r"version 4, kind full.*seen: 1: missing 'b'"):
        engine.begin_update(full_updates.full(4, {"a": TENSORS["a"]}))
    assert servers[0].steps == []
    assert answers(engine) == {"e-0"}


@pytest.fixture
def checked(servers, engine_on) -> FleetEngine:
    """Two servers whose weights are looked at; the first one's `b` is always another."""
    for server, b in zip(servers, (9, 2, 2), strict=True):
        server.digests = lambda b=b: {"a": 1, "b": b}
    return engine_on(FakeLauncher(servers[0], servers[2]), servers[1], version=-1)


def samples(*servers: FakeServer) -> list[bool]:
    return [server.samples for server in servers]


def test_without_a_copy_no_tensor_is_kept_and_a_lost_server_is_given_up(servers, engine_on, said: list[str]):
    engine = engine_on(FakeLauncher(servers[0], servers[1]), version=-1, keeps_copy=False)
    send(engine, 3)
    send(engine, 4, 1.0)
    assert value(servers[0]) == 1.0
    assert set(engine._updates._local._kept[1].values()) == {None}
    servers[0].key = "another"
    with pytest.raises(WeightSyncError, match="no copy of the weights"):
        list(engine.generate(make_requests(1)))
    assert "given up" in said[-1]


def test_servers_sample_with_new_weights_only_once_their_checksums_agree(checked: FleetEngine, servers):
    checked.held_dtypes()
    send(checked, 3)
    assert samples(servers[0], servers[1]) == [False, False]
    checked.verify({"a": 1, "b": 2})
    assert samples(servers[1]) == [True]
    answers(checked)
    assert servers[0].attempts == []


@pytest.mark.parametrize("instead", [FleetEngine.abandon_update, lambda engine: send(engine, 4)])
def test_an_update_that_is_never_checked_after_all_does_not_stop_servers_for_good(
    instead: Callable[[FleetEngine], None], checked: FleetEngine, servers
):
    checked.held_dtypes()
    send(checked, 3)
    instead(checked)
    assert samples(servers[0], servers[1]) == [True, True]


def test_a_broken_off_update_that_was_to_be_checked_leaves_the_next_one_alone(checked: FleetEngine, servers):
    send(checked, 3)
    checked.held_dtypes()
    checked.abandon_update()
    send(checked, 4)
    assert samples(servers[0], servers[1]) == [True, True]
    checked.held_dtypes()
    checked.begin_update(full_updates.full(5, TENSORS))
    checked.abandon_update()
    send(checked, 6)
    assert samples(servers[0], servers[1]) == [True, True]
