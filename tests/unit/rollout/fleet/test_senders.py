"""Sets of weights that two trainer ranks send to the same servers; live ones are in `tests/sglang`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from fleet_fake import FakeLauncher, FakeServer, Network
from full_updates import full
from torch import Tensor
from waiting import eventually

from moerl.contract.commands import AnyCommand, KeepWeights, Reply, Resend
from moerl.errors import TrainerError, WeightSyncError, undoing
from moerl.kernels.checksum import checksums
from moerl.ranks.senders import RankSenders, RanksInTurn
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.servers_sink import ServersSink

FIRST = {"a": torch.zeros(2, 3)}
SECOND = {"b": torch.ones(4), "c": torch.ones(2)}
PARTS = (FIRST, SECOND)
WHOLE = FIRST | SECOND
SHAPES = {name: tuple(tensor.shape) for name, tensor in WHOLE.items()}
WHOLE_7 = {"a": 7.0, "b": 8.0, "c": 8.0}
Part = Mapping[str, Tensor]


class FakeRanks:
    """Ranks that are senders alone. lost: what the next command raises."""

    peak_rss_bytes = ()

    def __init__(self, network: Network) -> None:
        self.sinks = [ServersSink(network.channel_of_part, 1 << 20, keeps_copy=True, together=False) for _ in PARTS]
        self.lost: Exception | None = None

    def publish(
        self, version: int, targets: Sequence[Any], parts: Sequence[Part], checked: Sequence[bool]
    ) -> list[Reply]:
        """Sends tensor by tensor, as ranks do at the command `Publish`."""
        replies = []
        for sink, part, is_checked in zip(self.sinks, parts, checked, strict=True):
            sink.targets = targets
            sink.begin_update(full(version, WHOLE))
            for each in part.items():
                sink.receive([each])
            sink.end_update()
            sums = checksums(part.items()) if is_checked else dict.fromkeys(part)
            replies.append(Reply(checksums=dict(sums), failed=sink.failed()))
        return replies

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        if self.lost is not None:
            raise self.lost
        for sink in self.sinks:
            if isinstance(command, KeepWeights):
                sink.keep(command.version)
            elif isinstance(command, Resend):
                for bucket in sink.kept(command.version, command.targets):
                    sink.resend(bucket, command.targets)
        return [Reply(failed=sink.failed()) for sink in self.sinks]


class Led:
    """An engine whose updates two ranks send, as the controller leads them."""

    def __init__(self, engine: FleetEngine, network: Network) -> None:
        self.engine, self.ranks = engine, FakeRanks(network)
        self.senders = RankSenders(RanksInTurn(cast(Any, self.ranks)))
        engine.send_by(self.senders)

    def send(
        self, version: int, value: float = 0.0, parts: Sequence[Part] = PARTS, checked: Sequence[bool] | None = None
    ) -> None:
        """checked: the senders that compute checksums; None if the update is not checked."""
        changed = [{name: tensor + value for name, tensor in part.items()} for part in parts]
        with undoing(self.engine.abandon_update):
            if checked is not None:
                self.engine.held_dtypes()
            self.engine.begin_update(full(version, WHOLE))
            replies = self.ranks.publish(version, self.senders.targets, changed, checked or (False, False))
            self.senders.published(replies)
            self.engine.end_update()
            if checked is not None:
                sums = {name: value for reply in replies for name, value in reply.checksums.items()}
                self.engine.verify({name: value for name, value in sums.items() if value is not None})


@pytest.fixture
def engine_on(engine_on: Callable[..., FleetEngine]) -> Callable[..., FleetEngine]:
    return partial(engine_on, shapes=SHAPES, version=-1)


@pytest.fixture
def two(servers: list[FakeServer], engine_on, network: Network) -> Led:
    """An engine on two servers, the first of which has a spare one, and its senders."""
    return Led(engine_on(FakeLauncher(servers[0], servers[2]), servers[1]), network)


def values(server: FakeServer) -> dict[str, float]:
    return {name: float(tensor.reshape(-1)[0]) for name, tensor in server.held.items()}


def test_servers_hold_the_parts_of_all_senders_as_one_version(two: Led, servers):
    for version in (3, 4):
        two.send(version, float(version))
        whole = {"a": version + 0.0, "b": version + 1.0, "c": version + 1.0}
        assert values(servers[0]) == values(servers[1]) == whole
        assert servers[0].weight_version == servers[1].weight_version == version
    assert two.engine.handshake().policy_version == 4


def test_the_engines_process_sends_nothing_and_keeps_no_tensors(two: Led, servers):
    two.send(3)
    steps = [step for step in servers[0].steps if "join" in step or "bucket" in step]
    assert sorted(steps) == ["part bucket 0", "part bucket 0", "part bucket 1", "part join", "part join"]
    assert two.engine._updates._holders is two.senders
    two.engine.begin_update(full(4, WHOLE))
    with pytest.raises(WeightSyncError, match="a bucket in the engine's process"):
        two.engine.receive([("a", FIRST["a"])])
    two.engine.abandon_update()


def test_a_bucket_of_the_trainer_is_sent_as_it_is_and_what_is_kept_in_buckets_of_the_largest_size(
    servers, engine_on, network: Network
):
    led = Led(engine_on(servers[0]), network)
    for sink in led.ranks.sinks:
        sink._sender.bucket_bytes = 1
    led.ranks.publish = lambda version, targets, parts, checked: [_publish_at_once(led.ranks, version, targets, parts)]
    led.send(3)
    assert sorted(step for step in servers[0].steps if "bucket" in step) == ["part bucket 0"]
    servers[0].steps.clear()
    led.engine.begin_update(full(4, WHOLE))
    led.engine.abandon_update()
    assert sorted(step for step in servers[0].steps if "bucket" in step) == [f"part bucket {n}" for n in range(3)]


def _publish_at_once(ranks: FakeRanks, version: int, targets: Sequence[Any], parts: Sequence[Part]) -> Reply:
    """The first sender sends everything, in one bucket."""
    whole = {name: tensor for part in parts for name, tensor in part.items()}
    del ranks.sinks[1:]
    [sink] = ranks.sinks
    sink.targets = targets
    sink.begin_update(full(version, WHOLE))
    sink.receive(whole.items())
    sink.end_update()
    return Reply(checksums=dict.fromkeys(whole), failed=sink.failed())


def test_a_server_that_comes_late_gets_all_parts(two: Led, servers):
    servers[0].fail("end")
    two.send(3, 7.0)
    eventually(lambda: set(two.engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7
    two.send(4, 9.0)
    assert values(servers[2]) == values(servers[1]) == {"a": 9.0, "b": 10.0, "c": 10.0}


def test_a_server_that_comes_late_before_the_first_set_of_the_senders_gets_what_the_engine_sent(
    servers, engine_on, network: Network
):
    engine = engine_on(FakeLauncher(servers[0], servers[2]), servers[1])
    engine.begin_update(full(3, WHOLE))
    engine.receive([(name, tensor + 7.0) for part in PARTS for name, tensor in part.items()])
    servers[0].fail("end")
    engine.end_update()
    led = Led(engine, network)
    eventually(lambda: set(engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7
    led.send(4, 9.0)
    assert values(servers[2]) == {"a": 9.0, "b": 10.0, "c": 10.0}


@pytest.mark.parametrize("step", ["join", "bucket 0", "bucket 1"])
def test_a_server_that_one_sender_cannot_reach_is_replaced_while_the_other_has_the_update(
    step: str, two: Led, servers, said: list[str]
):
    servers[0].fail(f"part {step}")
    two.send(3, 7.0)
    assert "lost" in said[0]
    assert f"part {step} failed" in said[0]
    eventually(lambda: set(two.engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7


def test_an_update_that_a_rank_breaks_off_brings_all_parts_back(two: Led, servers):
    two.send(3, 7.0)
    with pytest.raises(WeightSyncError, match="'x'"):
        two.send(4, 50.0, (FIRST, {"b": SECOND["b"], "x": SECOND["b"]}))
    assert values(servers[0]) == values(servers[1]) == WHOLE_7
    assert two.engine.handshake().policy_version == 3


@pytest.mark.parametrize(
    ("parts", "named"),
    [(({}, SECOND), "'a'"), ((FIRST, {"b": SECOND["b"]}), "'c'"), ((FIRST | SECOND, SECOND), "came twice")],
)
def test_parts_that_are_not_a_whole_set_are_refused_and_undone(parts, named: str, two: Led, servers):
    two.send(3, 7.0)
    with pytest.raises(WeightSyncError, match=named):
        two.send(4, 9.0, parts)
    assert values(servers[0]) == values(servers[1]) == WHOLE_7
    assert two.engine.handshake().policy_version == 3


def test_a_bucket_that_comes_after_an_update_was_given_up_is_not_sent(two: Led, servers):
    two.send(3, 7.0)
    two.engine.begin_update(full(4, WHOLE))
    two.ranks.sinks[1].begin_update(full(4, WHOLE))
    two.engine.abandon_update()
    with pytest.raises(WeightSyncError, match="none is open"):
        two.ranks.sinks[1].receive([("b", SECOND["b"] + 50.0)])
    assert values(servers[0]) == values(servers[1]) == WHOLE_7


def test_a_server_that_failed_at_a_sender_is_replaced_also_if_the_set_is_not_whole(two: Led, servers):
    two.send(3, 7.0)
    servers[0].fail("part bucket 0")
    with pytest.raises(WeightSyncError, match="'a'"):
        two.send(4, 9.0, ({}, SECOND))
    eventually(lambda: set(two.engine.states.values()) == {"healthy"})
    assert values(servers[2]) == values(servers[1]) == WHOLE_7


def test_a_server_that_failed_before_an_update_was_given_up_is_in_use_again_once_it_has_all_parts(
    two: Led, servers, said: list[str]
):
    two.send(3, 7.0)
    servers[0].fail("part bucket 0")
    two.engine.begin_update(full(4, WHOLE))
    sink = two.ranks.sinks[1]
    sink.targets = two.senders.targets
    sink.begin_update(full(4, WHOLE))
    sink.receive([("b", SECOND["b"])])
    servers[0].before.clear()
    two.engine.abandon_update()
    assert said == []
    assert values(servers[0]) == values(servers[1]) == WHOLE_7


def test_a_part_of_another_version_is_never_sent_to_a_late_server(two: Led):
    two.send(3, 7.0)
    sender = two.ranks.sinks[1]._sender
    sender._kept = 4, sender._kept[1]
    with pytest.raises(WeightSyncError, match="version 4"):
        two.engine._wait(two.engine._updates.bring_up(two.engine._fleet.replicas[1]))


def test_a_tensor_that_the_model_does_not_have_is_refused_at_its_sender(two: Led):
    two.engine.begin_update(full(3, WHOLE))
    two.ranks.sinks[1].begin_update(full(3, WHOLE))
    with pytest.raises(WeightSyncError, match="'x'"):
        two.ranks.sinks[1].receive([("x", torch.ones(1))])


def test_checksums_of_all_parts_are_compared(two: Led, servers, said: list[str]):
    is_spoilt = iter([True])

    def digests() -> Mapping[str, int]:
        """The first time the first server holds another b."""
        add = 1.0 if next(is_spoilt, False) else 0.0
        return checksums((name, t + add if name == "b" else t) for name, t in servers[0].held.items())

    servers[0].digests = digests
    two.send(3, 7.0, checked=(True, True))
    eventually(lambda: set(two.engine.states.values()) == {"healthy"})
    assert "'b'" in said[0]
    assert "1 of 3 checksums differ" in said[0]
    assert values(servers[0]) == WHOLE_7


def test_a_tensor_whose_sender_computed_no_checksum_is_refused(two: Led):
    with pytest.raises(WeightSyncError, match="without a checksum"):
        two.send(3, checked=(True, False))


def test_senders_that_are_gone_end_the_update_and_leave_no_server_in_use(two: Led):
    two.send(3, 7.0)
    two.ranks.lost = TrainerError("rank 1 was lost")
    with pytest.raises(WeightSyncError, match="rank 1 was lost"):
        two.send(4, 9.0)
    assert "healthy" not in two.engine.states.values()


def test_a_sink_leaves_the_servers_which_keep_running(two: Led, servers):
    two.send(3, 7.0)
    for sink in two.ranks.sinks:
        sink.close()
    assert values(servers[0]) == WHOLE_7
