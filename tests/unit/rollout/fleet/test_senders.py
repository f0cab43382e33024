"""Sets of weights that two senders in other processes send to the same servers; live ones are in `tests/sglang`."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from fleet_fake import FLOAT32, FakeLauncher, FakeServer, Network, options
from strangers import SAYINGS, calling
from torch import Tensor
from waiting import eventually

from moerl.errors import EngineError, WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.processes import admission
from moerl.rollout.fleet import senders
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.senders import Command, Introduction, Reply, Senders
from moerl.rollout.fleet.shard_sender import ShardSender

FIRST = {"a": torch.zeros(2, 3)}
SECOND = {"b": torch.ones(4), "c": torch.ones(2)}
PARTS = (FIRST, SECOND)
SHAPES = {name: tuple(tensor.shape) for part in PARTS for name, tensor in part.items()}
RANKS = (0, 3)
WHOLE_7 = {"a": 7.0, "b": 8.0, "c": 8.0}
Part = Mapping[str, Tensor]


@pytest.fixture
def engine_on(engine_on: Callable[..., FleetEngine]) -> Callable[..., FleetEngine]:
    return partial(engine_on, shapes=SHAPES, version=-1)


MakeSender = Callable[..., ShardSender]


@pytest.fixture
def shard_sender(network: Network) -> MakeSender:
    def make(introduction: Introduction, rank: int = RANKS[1], seconds: float = 20.0) -> ShardSender:
        return ShardSender(rank, introduction, SHAPES, network.channel_of_part, seconds)

    return make


@pytest.fixture
def shared(shard_sender: MakeSender) -> Callable[[FleetEngine], tuple[FleetEngine, list[ShardSender]]]:
    """From an engine to it and its senders."""

    def share(engine: FleetEngine) -> tuple[FleetEngine, list[ShardSender]]:
        introduction = engine.share(RANKS, 20.0)
        return engine, [shard_sender(introduction, rank) for rank in RANKS]

    return share


@pytest.fixture
def two(servers: list[FakeServer], engine_on, shared) -> tuple[FleetEngine, list[ShardSender]]:
    """An engine on two servers, the first of which has a spare one, and its senders."""
    return shared(engine_on(FakeLauncher(servers[0], servers[2]), servers[1]))


def publish(made: Sequence[ShardSender], version: int, value: float, parts: Sequence[Part], *, verify: bool) -> None:
    """What trainer ranks do between the engine's begin and end."""
    for sender, part in zip(made, parts, strict=True):
        if verify:
            sender.held_dtypes()
        sender.begin_update(version)
        for name, tensor in part.items():
            sender.receive([(name, tensor + value)])
        sender.end_update()
        if verify:
            sender.verify(checksums((name, tensor + value) for name, tensor in part.items()))


def send(
    engine: FleetEngine,
    made: Sequence[ShardSender],
    version: int,
    value: float = 0.0,
    parts: Sequence[Part] = PARTS,
    *,
    verify: bool = False,
) -> None:
    with engine.updating(version, verify=verify):
        publish(made, version, value, parts, verify=verify)


def values(server: FakeServer) -> dict[str, float]:
    return {name: float(tensor.reshape(-1)[0]) for name, tensor in server.held.items()}


def test_servers_hold_the_parts_of_all_senders_as_one_version(two, servers):
    engine, made = two
    for version in (3, 4):
        send(engine, made, version, float(version))
        whole = {"a": version + 0.0, "b": version + 1.0, "c": version + 1.0}
        assert values(servers[0]) == values(servers[1]) == whole
        assert servers[0].weight_version == servers[1].weight_version == version
    assert engine.handshake().policy_version == 4


def test_the_engines_process_sends_nothing_and_keeps_no_tensors(two, servers):
    engine, made = two
    send(engine, made, 3)
    steps = [step for step in servers[0].steps if "join" in step or "bucket" in step]
    assert sorted(steps) == ["part bucket 0", "part bucket 0", "part bucket 1", "part join", "part join"]
    assert engine._updates._holders is engine._updates._senders
    engine.begin_update(4)
    with pytest.raises(WeightSyncError, match="a bucket in the engine's process"):
        engine.receive([("a", FIRST["a"])])
    engine.abandon_update()


def test_a_server_that_comes_late_gets_all_parts(two, servers):
    engine, made = two
    servers[0].fail("end")
    send(engine, made, 3, 7.0)
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7
    send(engine, made, 4, 9.0)
    assert values(servers[2]) == values(servers[1]) == {"a": 9.0, "b": 10.0, "c": 10.0}


def test_a_server_that_comes_late_before_the_first_set_of_the_senders_gets_what_the_engine_sent(
    servers, engine_on, shared
):
    engine = engine_on(FakeLauncher(servers[0], servers[2]), servers[1])
    engine.begin_update(3)
    engine.receive([(name, tensor + 7.0) for part in PARTS for name, tensor in part.items()])
    servers[0].fail("end")
    engine.end_update()
    engine, made = shared(engine)
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7
    send(engine, made, 4, 9.0)
    assert values(servers[2]) == {"a": 9.0, "b": 10.0, "c": 10.0}


@pytest.mark.parametrize("step", ["join", "bucket 0", "bucket 1"])
def test_a_server_that_one_sender_cannot_reach_is_replaced_while_the_other_has_the_update(
    step: str, two, servers, said: list[str]
):
    engine, made = two
    servers[0].fail(f"part {step}")
    send(engine, made, 3, 7.0)
    assert "lost" in said[0]
    assert f"part {step} failed" in said[0]
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7


def test_an_update_that_a_rank_breaks_off_brings_all_parts_back(two, servers):
    engine, made = two
    send(engine, made, 3, 7.0)
    with pytest.raises(WeightSyncError, match="'x'"):
        send(engine, made, 4, 50.0, (FIRST, {"b": SECOND["b"], "x": SECOND["b"]}))
    assert values(servers[0]) == values(servers[1]) == WHOLE_7
    assert engine.handshake().policy_version == 3


@pytest.mark.parametrize(
    ("parts", "named"),
    [(({}, SECOND), "'a'"), ((FIRST, {"b": SECOND["b"]}), "'c'"), ((FIRST | SECOND, SECOND), "two senders")],
)
def test_parts_that_are_not_a_whole_set_are_refused_and_undone(parts, named: str, two, servers):
    engine, made = two
    send(engine, made, 3, 7.0)
    with pytest.raises(WeightSyncError, match=named):
        send(engine, made, 4, 9.0, parts)
    assert values(servers[0]) == values(servers[1]) == WHOLE_7
    assert engine.handshake().policy_version == 3


def test_a_bucket_that_comes_after_an_update_was_given_up_is_not_sent(two, servers):
    engine, made = two
    send(engine, made, 3, 7.0)
    engine.begin_update(4)
    made[1].begin_update(4)
    engine.abandon_update()
    with pytest.raises(WeightSyncError, match="none is open"):
        made[1].receive([("b", SECOND["b"] + 50.0)])
    assert values(servers[0]) == values(servers[1]) == WHOLE_7


def test_a_bucket_of_an_earlier_update_is_not_sent_in_the_next_one(two, servers):
    engine, made = two
    send(engine, made, 3, 7.0)
    engine.begin_update(4)
    made[1].begin_update(4)
    engine.abandon_update()
    engine.begin_update(5)
    with pytest.raises(WeightSyncError, match="version 4"):
        made[1].receive([("b", SECOND["b"] + 50.0)])
    engine.abandon_update()
    assert values(servers[0]) == values(servers[1]) == WHOLE_7


def test_a_set_of_another_version_than_the_engine_began_is_refused(two):
    engine, made = two
    send(engine, made, 3, 7.0)
    engine.begin_update(4)
    for sender in made:
        sender.begin_update(5)
    with pytest.raises(WeightSyncError, match=r"rank 0.*version 5"):
        engine.end_update()


def test_a_server_that_failed_at_a_sender_is_replaced_also_where_the_set_is_not_whole(two, servers):
    engine, made = two
    send(engine, made, 3, 7.0)
    servers[0].fail("part bucket 0")
    with pytest.raises(WeightSyncError, match="'a'"):
        send(engine, made, 4, 9.0, ({}, SECOND))
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7


def test_a_server_that_failed_before_an_update_was_given_up_is_in_use_again_once_it_has_all_parts(
    two, servers, said: list[str]
):
    engine, made = two
    send(engine, made, 3, 7.0)
    servers[0].fail("part bucket 0")
    engine.begin_update(4)
    made[1].begin_update(4)
    made[1].receive([("b", SECOND["b"])])
    servers[0].before.clear()
    engine.abandon_update()
    assert said == []
    assert values(servers[0]) == values(servers[1]) == WHOLE_7


def test_a_part_of_another_version_is_never_sent_to_a_late_server(two, servers):
    engine, made = two
    send(engine, made, 3, 7.0)
    made[1]._sender._held = 4, made[1]._sender._held[1]
    with pytest.raises(WeightSyncError, match="version 4"):
        engine._wait(engine._updates.bring_up(engine._fleet.replicas[1]))


def test_a_tensor_of_two_senders_is_refused(two):
    engine, made = two
    with pytest.raises(WeightSyncError, match="two senders"):
        send(engine, made, 3, 0.0, (FIRST | SECOND, SECOND))


def test_a_tensor_that_the_model_does_not_have_is_refused_at_its_sender(two):
    engine, made = two
    engine.begin_update(3)
    made[1].begin_update(3)
    with pytest.raises(WeightSyncError, match="'x'"):
        made[1].receive([("x", torch.ones(1))])


def test_checksums_of_all_parts_are_compared(two, servers, said: list[str]):
    engine, made = two
    is_spoilt = iter([True])

    def digests() -> Mapping[str, int]:
        """The first time the first server holds another b."""
        add = 1.0 if next(is_spoilt, False) else 0.0
        return checksums((name, t + add if name == "b" else t) for name, t in servers[0].held.items())

    servers[0].digests = digests
    answers: list[Mapping[str, str]] = []
    asks = threading.Thread(target=lambda: answers.append(made[1].held_dtypes()))  # before the engine has begun
    asks.start()
    send(engine, made, 3, 7.0, verify=True)
    asks.join()
    assert answers == [FLOAT32]
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert "'b'" in said[0]
    assert "1 of 3 checksums differ" in said[0]
    assert values(servers[0]) == WHOLE_7


def test_a_tensor_whose_sender_computed_no_checksum_is_refused(two):
    engine, made = two
    engine.held_dtypes()
    engine.begin_update(3)
    publish(made[:1], 3, 0.0, PARTS[:1], verify=True)
    publish(made[1:], 3, 0.0, PARTS[1:], verify=False)
    engine.end_update()
    with pytest.raises(WeightSyncError, match="without a checksum"):
        engine.verify({})


def test_a_sender_that_is_gone_ends_the_update_in_an_error_that_names_it(servers, engine_on):
    engine = engine_on(servers[0])
    senders.connect(engine.share([3], 20.0), 3, 20.0).close()
    with pytest.raises(WeightSyncError, match="rank 3, a sender"):
        engine.begin_update(3)


def test_a_sender_that_never_comes_ends_the_update_in_an_error_that_names_it(servers, engine_on):
    engine = engine_on(servers[0])
    engine.share([3], 0.1)
    with pytest.raises(WeightSyncError, match=r"rank 3, a sender.*no connection"):
        engine.begin_update(3)


def test_a_sender_waits_for_the_engine_no_longer_than_a_step_may_take(servers, engine_on, shard_sender):
    sender = shard_sender(engine_on(servers[0]).share([3], 20.0), seconds=5.0)
    sender._seconds = 0.05
    with pytest.raises(WeightSyncError, match="has not begun"):
        sender.held_dtypes()


@pytest.fixture
def one() -> Iterator[Senders]:
    made = Senders([3], 20.0, options())
    yield made
    asyncio.run(made.close())


def ask(all_senders: Senders, command: Command) -> list[Reply]:
    return asyncio.run(all_senders.ask(command))


def test_strangers_are_turned_away_and_senders_still_come_in(one: Senders, shard_sender):
    known = one.introduction
    with pytest.raises(WeightSyncError, match="AuthenticationError"):
        shard_sender(replace(known, key=b"another key"))
    with socket.create_connection((known.host, known.port)):  # says nothing, and does not leave
        shard_sender(known, rank=4)  # knows the key, but nobody waits for it
        shard_sender(known).begin_update(3)
        assert [set(reply.checksums) for reply in ask(one, Command("take", version=3))] == [set()]


@pytest.mark.parametrize("said", SAYINGS.values(), ids=SAYINGS.keys())
def test_many_strangers_keep_no_sender_out(said: bytes, one: Senders, shard_sender, monkeypatch):
    monkeypatch.setattr(admission, "HANDSHAKE_SECONDS", 600.0)
    known = one.introduction
    with calling(known.host, known.port, said, count=100):
        shard_sender(known).begin_update(3)
        assert [set(reply.checksums) for reply in ask(one, Command("take", version=3))] == [set()]


def test_senders_are_listened_for_at_private_addresses_alone():
    with pytest.raises(EngineError, match="server address"):
        Senders([3], 20.0, options(), host="0.0.0.0")


def test_the_key_does_not_show_in_messages(one: Senders):
    assert repr(one.introduction.key) not in repr(one.introduction)


def test_a_reply_that_comes_too_late_is_not_taken_for_the_next_one(one: Senders, shard_sender):
    sender = shard_sender(one.introduction)
    eventually(one._is_complete.is_set)
    one._seconds = 0.2
    sender._wait(sender._sender._lock.acquire())
    with pytest.raises(WeightSyncError, match="nothing for"):
        ask(one, Command("begin", version=3))
    one._seconds = 20.0
    sender._loop.call_soon_threadsafe(sender._sender._lock.release)
    eventually(lambda: sender._sender._open_version == 3)  # it does what it was told, late
    sender.begin_update(3)
    sender.receive([("b", SECOND["b"])])
    assert [set(reply.checksums) for reply in ask(one, Command("take", version=3))] == [{"b"}]
