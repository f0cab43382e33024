"""Sets of weights that two roots send to the same servers; live ones are in `tests/sglang`."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch
from sglang_fake import FakeLink, FakeServer, FakeSource
from torch import Tensor
from waiting import eventually

from moerl.errors import WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.rollout.sglang import updates
from moerl.rollout.sglang.engine import SGLangEngine
from moerl.rollout.sglang.roots import Command, Introduction, OtherRoots, PartSink

HERE = {"a": torch.zeros(2, 3)}
ELSEWHERE = {"b": torch.ones(4), "c": torch.ones(2)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in (HERE | ELSEWHERE).items()}
RANK = 3


@pytest.fixture
def engine_on(engine_on: Callable[..., SGLangEngine]) -> Callable[..., SGLangEngine]:
    return partial(engine_on, shapes=SHAPES, version=-1)


def other_root(introduction: Introduction, seconds: float = 20.0) -> PartSink:
    return PartSink(RANK, introduction, SHAPES, torch.device("cpu"), seconds)


@pytest.fixture
def two(servers: list[FakeServer], engine_on) -> tuple[SGLangEngine, PartSink]:
    """An engine on two servers, the first of which has a spare one, and the other root."""
    engine = engine_on(FakeSource(servers[0], servers[2]), servers[1])
    return engine, other_root(engine.share([RANK], 20.0))


def send(
    engine: SGLangEngine,
    sink: PartSink,
    version: int,
    value: float = 0.0,
    *,
    here: Mapping[str, Tensor] = HERE,
    elsewhere: Mapping[str, Tensor] = ELSEWHERE,
) -> None:
    """As trainer ranks do it: all begin, all send, the first root ends last."""
    engine.begin_update(version)
    sink.begin_update(version)
    for name, tensor in elsewhere.items():
        sink.receive([(name, tensor + value)])
    engine.receive([(name, tensor + value) for name, tensor in here.items()])
    sink.end_update()
    engine.end_update()


def values(server: FakeServer) -> dict[str, float]:
    return {name: float(tensor.reshape(-1)[0]) for name, tensor in FakeLink.held[server.endpoint.url].items()}


def test_servers_hold_the_parts_of_all_roots_as_one_version(two, servers):
    engine, sink = two
    for version in (3, 4):
        send(engine, sink, version, float(version))
        whole = {"a": version + 0.0, "b": version + 1.0, "c": version + 1.0}
        assert values(servers[0]) == values(servers[1]) == whole
        assert servers[0].weight_version == servers[1].weight_version == str(version)
    assert engine.handshake().policy_version == 4


def test_a_server_that_comes_late_gets_all_parts(two, servers):
    engine, sink = two
    FakeLink.fail(servers[0], "end")
    send(engine, sink, 3, 7.0)
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == {"a": 7.0, "b": 8.0, "c": 8.0}
    send(engine, sink, 4, 9.0)
    assert values(servers[2]) == values(servers[1]) == {"a": 9.0, "b": 10.0, "c": 10.0}


@pytest.mark.parametrize("step", ["join", "bucket 0", "bucket 1"])
def test_a_server_that_another_root_cannot_reach_is_replaced_while_the_other_has_the_update(
    step: str, two, servers, said: list[str]
):
    engine, sink = two
    FakeLink.fail(servers[0], f"part {step}")
    send(engine, sink, 3, 7.0)
    assert "lost" in said[0]
    assert f"part {step} failed" in said[0]
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == {"a": 7.0, "b": 8.0, "c": 8.0}


def test_an_abandoned_update_brings_all_parts_back(two, servers):
    engine, sink = two
    send(engine, sink, 3, 7.0)
    engine.begin_update(4)
    sink.begin_update(4)
    sink.receive([("b", ELSEWHERE["b"] + 50.0)])
    sink.abandon_update()
    engine.abandon_update()
    assert values(servers[0]) == values(servers[1]) == {"a": 7.0, "b": 8.0, "c": 8.0}
    assert engine.handshake().policy_version == 3


@pytest.mark.parametrize(
    ("here", "elsewhere", "named"),
    [({}, ELSEWHERE, "'a'"), (HERE, {"b": ELSEWHERE["b"]}, "'c'"), (HERE | ELSEWHERE, ELSEWHERE, "two roots")],
)
def test_parts_that_are_not_a_whole_set_are_refused_and_undone(here, elsewhere, named: str, two, servers):
    engine, sink = two
    send(engine, sink, 3, 7.0)
    with pytest.raises(WeightSyncError, match=named):
        send(engine, sink, 4, 9.0, here=here, elsewhere=elsewhere)
    assert values(servers[0]) == values(servers[1]) == {"a": 7.0, "b": 8.0, "c": 8.0}
    assert engine.handshake().policy_version == 3


def test_a_bucket_that_comes_after_an_update_was_given_up_is_not_sent(two, servers):
    engine, sink = two
    send(engine, sink, 3, 7.0)
    engine.begin_update(4)
    sink.begin_update(4)
    engine.abandon_update()
    with pytest.raises(WeightSyncError, match="none is open"):
        sink.receive([("b", ELSEWHERE["b"] + 50.0)])
    assert values(servers[0]) == values(servers[1]) == {"a": 7.0, "b": 8.0, "c": 8.0}


def test_a_server_that_failed_at_another_root_is_replaced_also_where_the_set_is_not_whole(two, servers):
    engine, sink = two
    send(engine, sink, 3, 7.0)
    FakeLink.fail(servers[0], "part bucket 0")
    with pytest.raises(WeightSyncError, match="'a'"):
        send(engine, sink, 4, 9.0, here={})
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == {"a": 7.0, "b": 8.0, "c": 8.0}


def test_a_server_that_failed_before_an_update_was_given_up_is_in_use_again_once_it_has_all_parts(
    two, servers, said: list[str]
):
    engine, sink = two
    send(engine, sink, 3, 7.0)
    FakeLink.fail(servers[0], "part bucket 0")
    engine.begin_update(4)
    sink.begin_update(4)
    sink.receive([("b", ELSEWHERE["b"])])
    FakeLink.before.clear()
    engine.abandon_update()
    assert said == []
    assert values(servers[0]) == values(servers[1]) == {"a": 7.0, "b": 8.0, "c": 8.0}


def test_a_part_of_another_version_is_never_sent_to_a_late_server(two, servers):
    engine, sink = two
    send(engine, sink, 3, 7.0)
    sink._held = 4, sink._held[1]
    with pytest.raises(WeightSyncError, match="version 4"):
        engine._wait(engine._updates.bring_up(engine._fleet.members[1]))


def test_a_tensor_of_two_other_roots_is_refused(servers, engine_on):
    engine = engine_on(servers[0])
    known = engine.share([RANK, RANK + 1], 20.0)
    sinks = [PartSink(rank, known, SHAPES, torch.device("cpu"), 20.0) for rank in (RANK, RANK + 1)]
    engine.begin_update(3)
    for sink in sinks:
        sink.begin_update(3)
        sink.receive(list(ELSEWHERE.items()))
    engine.receive(list(HERE.items()))
    with pytest.raises(WeightSyncError, match="two roots"):
        engine.end_update()


def test_a_tensor_that_the_model_does_not_have_is_refused_at_its_root(two):
    engine, sink = two
    engine.begin_update(3)
    sink.begin_update(3)
    with pytest.raises(WeightSyncError, match="'x'"):
        sink.receive([("x", torch.ones(1))])


def test_checksums_of_all_parts_are_compared(two, servers, said: list[str], monkeypatch: pytest.MonkeyPatch):
    engine, sink = two
    asked: list[str] = []

    def held(endpoint, model, *, timeout_seconds: float) -> dict[str, int]:
        """The first time the first server holds another b."""
        asked.append(endpoint.url)
        tensors = FakeLink.held[endpoint.url]
        is_spoilt = endpoint.url == servers[0].endpoint.url and asked.count(endpoint.url) == 1
        return checksums((name, t + 1.0 if is_spoilt and name == "b" else t) for name, t in tensors.items())

    monkeypatch.setattr(updates, "held_checksums", held)
    monkeypatch.setattr(updates, "held_dtypes", lambda *args, **kwargs: dict.fromkeys(SHAPES, "float32"))
    dtypes: list[Mapping[str, str]] = []
    asks = threading.Thread(target=lambda: dtypes.append(sink.held_dtypes()))  # before the engine has begun
    asks.start()
    engine.held_dtypes()
    send(engine, sink, 3, 7.0)
    asks.join()
    assert dtypes == [dict.fromkeys(SHAPES, "float32")]
    sink.verify(checksums((name, tensor + 7.0) for name, tensor in ELSEWHERE.items()))
    engine.begin_update(4)
    sink.begin_update(4)
    sink.receive(list(ELSEWHERE.items()))
    engine.receive(list(HERE.items()))
    sink.end_update()
    sink.verify(checksums(ELSEWHERE.items()))
    engine.end_update()
    engine.verify(checksums(HERE.items()))
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert "'b'" in said[0]
    assert "1 of 3 checksums differ" in said[0]
    assert values(servers[0]) == {"a": 0.0, "b": 1.0, "c": 1.0}


def test_a_root_that_is_gone_ends_the_update_in_an_error_that_names_it(servers, engine_on):
    engine = engine_on(servers[0])
    known = engine.share([RANK], 20.0)
    with Client(known.address, authkey=known.key) as connection:
        connection.send_bytes(RANK.to_bytes(8))
    with pytest.raises(WeightSyncError, match=f"rank {RANK}, a root"):
        engine.begin_update(3)


def test_a_root_that_never_comes_ends_the_update_in_an_error_that_names_it(servers, engine_on):
    engine = engine_on(servers[0])
    engine.share([RANK], 0.1)
    with pytest.raises(WeightSyncError, match=f"rank {RANK}, a root.*no connection"):
        engine.begin_update(3)


def test_a_root_waits_for_the_engine_no_longer_than_a_step_may_take(servers, engine_on):
    sink = other_root(engine_on(servers[0]).share([RANK], 20.0), seconds=0.05)
    with pytest.raises(WeightSyncError, match="has not begun"):
        sink.held_dtypes()


@pytest.fixture
def others() -> Iterator[OtherRoots]:
    made = OtherRoots([RANK], 20.0)
    yield made
    made.close()


def test_strangers_are_turned_away_and_roots_still_come_in(others: OtherRoots):
    known = others.introduction
    with pytest.raises(AuthenticationError):
        other_root(Introduction(known.address, b"another key"))
    with socket.socket(socket.AF_UNIX) as stranger:  # leaves without a word
        stranger.connect(known.address)
    assert stat.S_IMODE(Path(known.address).parent.stat().st_mode) == 0o700
    other_root(known).begin_update(3)
    assert [set(reply.checksums) for reply in others.ask(Command("take"))] == [set()]


def test_a_reply_that_comes_too_late_is_not_taken_for_the_next_one(others: OtherRoots):
    sink = other_root(others.introduction)
    eventually(others._is_complete.is_set)
    others._seconds = 0.2
    with sink._lock, pytest.raises(WeightSyncError, match="nothing for"):
        others.ask(Command("begin"))
    others._seconds = 20.0
    eventually(lambda: sink._is_open)  # it does what it was told, late
    sink.begin_update(3)
    sink.receive([("b", ELSEWHERE["b"])])
    assert [set(reply.checksums) for reply in others.ask(Command("take"))] == [{"b"}]
