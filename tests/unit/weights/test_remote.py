"""A sink in another process, by way of a connection: the same calls, the same tensors, the same errors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import AuthenticationError
from typing import Any

import pytest
import torch
from strangers import SAYINGS, calling
from waiting import eventually

from moerl.errors import WeightSyncError
from moerl.processes import admission
from moerl.weights import remote as module
from moerl.weights.remote import RemoteSink, SinkServer


class FakeSink:
    """Remembers its calls; refuses the version 13, breaks at 17."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.may_receive = threading.Semaphore(1000)
        self.memory = ""

    def begin_update(self, version: int) -> None:
        if version == 13:
            raise WeightSyncError("an unlucky version", seen=13)
        if version == 17:
            raise ZeroDivisionError("of the engine")
        self.calls.append(("begin", version))

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.may_receive.acquire()
        self.tensors |= dict(tensors)
        self.calls.append("receive")

    def receive_written(self, what: bytes) -> None:
        self.may_receive.acquire()
        self.calls.append(("written", what))

    def end_update(self) -> None:
        self.calls.append("end")

    def abandon_update(self) -> None:
        self.calls.append("abandon")

    def held_dtypes(self) -> Mapping[str, str]:
        return {"a": "bfloat16"}

    def verify(self, sent: Mapping[str, int]) -> None:
        self.calls.append(("verify", dict(sent)))


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


@pytest.fixture
def server(sink: FakeSink) -> Iterator[SinkServer]:
    server = SinkServer(sink)
    yield server
    server.close()


def test_an_update_arrives_bit_for_bit(sink: FakeSink, server: SinkServer):
    remote = RemoteSink(server.address)
    sent = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.randn(4, 2).T,
        "c": torch.randn(()),
        "d": torch.zeros(0, 3),
    }
    assert remote.held_dtypes() == {"a": "bfloat16"}
    remote.begin_update(4)
    remote.receive(sent.items())
    remote.end_update()
    remote.verify({"a": 2**63 + 1})
    assert sink.calls == [("begin", 4), "receive", "end", ("verify", {"a": 2**63 + 1})]
    assert sink.tensors.keys() == sent.keys()
    for name, tensor in sent.items():
        assert torch.equal(sink.tensors[name], tensor)
        assert sink.tensors[name].dtype == tensor.dtype


@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: bytes(data) + bytes(4)], ids=["cut", "longer"])
def test_tensors_of_another_length_than_announced_are_refused_and_the_next_call_is_answered(
    change: Any, sink: FakeSink, server: SinkServer, monkeypatch: pytest.MonkeyPatch
):
    remote, packed = RemoteSink(server.address), module._packed
    monkeypatch.setattr(module, "_packed", lambda tensors: change(packed(tensors)))
    with pytest.raises(WeightSyncError, match=r"seen: \d+ bytes; expected: 12 bytes"):
        remote.receive([("a", torch.zeros(3))])
    assert not sink.tensors
    remote.begin_update(1)
    assert sink.calls == [("begin", 1)]


def test_what_the_sink_refuses_is_refused_here_and_the_next_update_may_come(sink: FakeSink, server: SinkServer):
    remote = RemoteSink(server.address)
    with pytest.raises(WeightSyncError, match="an unlucky version; seen: 13"):
        remote.begin_update(13)
    remote.abandon_update()
    remote.begin_update(14)
    assert sink.calls == ["abandon", ("begin", 14)]


def test_an_error_of_the_engine_that_is_not_ours_reaches_the_sender_too(sink: FakeSink, server: SinkServer):
    remote = RemoteSink(server.address)
    with pytest.raises(WeightSyncError, match="ZeroDivisionError: of the engine"):
        remote.begin_update(17)
    remote.begin_update(18)
    assert sink.calls == [("begin", 18)]


def test_a_stranger_without_the_key_is_turned_away(sink: FakeSink, server: SinkServer):
    with pytest.raises(AuthenticationError):
        RemoteSink(replace_key(server))
    RemoteSink(server.address).begin_update(1)
    assert ("begin", 1) in sink.calls


@pytest.mark.parametrize("said", SAYINGS.values(), ids=SAYINGS.keys())
def test_strangers_who_hold_their_connections_keep_no_sender_waiting_and_disturb_no_update(
    said: bytes, sink: FakeSink, server: SinkServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(admission, "HANDSHAKE_SECONDS", 600.0)
    held: list[RemoteSink] = []

    def update() -> None:
        held.append(RemoteSink(server.address))
        held[0].begin_update(1)

    with calling(server.address.host, server.address.port, said, count=20):
        # A thread: where a stranger is in the way, this waits for ever.
        threading.Thread(target=update, daemon=True).start()
        eventually(lambda: sink.calls == [("begin", 1)])
    with calling(server.address.host, server.address.port, said, count=20) as callers:
        held[0].receive([("a", torch.ones(2))])
        held[0].end_update()
        for caller in callers:
            caller.close()
        held[0].verify({"a": 1})
    assert sink.calls == [("begin", 1), "receive", "end", ("verify", {"a": 1})]


def replace_key(server: SinkServer) -> Any:
    import msgspec

    return msgspec.structs.replace(server.address, key=b"another")


def test_what_a_sender_that_is_gone_has_begun_is_forgotten(sink: FakeSink, server: SinkServer):
    remote = RemoteSink(server.address)
    remote.begin_update(2)
    remote._connection.close()
    eventually(lambda: sink.calls == [("begin", 2), "abandon"])


def test_a_sink_that_is_gone_is_an_error(server: SinkServer):
    remote = RemoteSink(server.address)
    remote.begin_update(1)
    server.close()
    with pytest.raises(WeightSyncError, match="the engine's process is gone in 'end'"):
        remote.end_update()


# --- beside what the sender does next ---------------------------------------------------------------------------------


class Told:
    """What was told of updates, in order."""

    def __init__(self) -> None:
        self.problems: list[Exception | None] = []

    def __call__(self, problem: Exception | None) -> None:
        self.problems.append(problem)


def send(remote: RemoteSink, version: int) -> None:
    remote.begin_update(version)
    remote.receive([("a", torch.full((2,), float(version)))])
    remote.end_update()


@pytest.mark.parametrize("verify", [False, True])
def test_a_sender_may_go_on_before_a_sink_has_the_update_which_is_told_once_it_does(
    verify: bool, sink: FakeSink, server: SinkServer
):
    remote, told = RemoteSink(server.address), Told()
    sink.may_receive = threading.Semaphore(0)
    server.take_beside(told, verify=verify)
    send(remote, 5)
    if verify:
        remote.verify({"a": 1})
    assert sink.calls in ([], [("begin", 5)])
    assert told.problems == []
    sink.may_receive.release()
    eventually(lambda: told.problems == [None])
    assert sink.calls == [("begin", 5), "receive", "end", *([("verify", {"a": 1})] if verify else [])]
    assert sink.tensors["a"].tolist() == [5, 5]


def test_a_problem_beside_the_sender_is_told_what_follows_is_left_out_and_the_next_update_is_taken(
    sink: FakeSink, server: SinkServer
):
    remote, told = RemoteSink(server.address), Told()
    server.take_beside(told, verify=True)
    remote.begin_update(17)
    eventually(lambda: server._beside is not None and server._beside._problem is not None)
    with pytest.raises(WeightSyncError, match="ZeroDivisionError: of the engine"):
        remote.receive([("a", torch.zeros(2))])
    with pytest.raises(WeightSyncError):
        remote.verify({})
    eventually(lambda: [type(problem) for problem in told.problems] == [ZeroDivisionError])
    assert sink.calls == []
    server.take_beside(told, verify=False)
    send(remote, 18)
    eventually(lambda: told.problems[1:] == [None])
    assert sink.calls == [("begin", 18), "receive", "end"]


def test_a_sender_is_two_buckets_ahead_of_a_sink_at_most(sink: FakeSink, server: SinkServer):
    remote = RemoteSink(server.address)
    sink.may_receive = threading.Semaphore(0)
    server.take_beside(Told(), verify=False)
    remote.begin_update(1)
    num_answered = 0

    def fill() -> None:
        nonlocal num_answered
        for _ in range(3):
            remote.receive([("a", torch.zeros(2))])
            num_answered += 1

    thread = threading.Thread(target=fill)
    thread.start()
    eventually(lambda: num_answered == 2)
    thread.join(0.2)
    assert num_answered == 2
    sink.may_receive.release(3)
    thread.join()
    assert num_answered == 3


def test_a_sender_that_writes_to_memory_can_wait_until_it_was_read(sink: FakeSink, server: SinkServer):
    remote = RemoteSink(server.address)
    sink.may_receive = threading.Semaphore(0)
    server.take_beside(Told(), verify=False)
    remote.begin_update(1)
    remote.receive_written(b"here")
    waited = threading.Thread(target=remote.wait)
    waited.start()
    waited.join(0.2)
    assert waited.is_alive()
    sink.may_receive.release()
    waited.join()
    assert sink.calls == [("begin", 1), ("written", b"here")]
