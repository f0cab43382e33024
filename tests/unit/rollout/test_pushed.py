"""Buckets that a sender pushes to another process: the same tensors, the same errors, and no strangers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from full_updates import full
from strangers import SAYINGS, calling
from waiting import eventually

from moerl.errors import WeightSyncError
from moerl.processes import admission
from moerl.rollout.pushed import BucketReceiver, PushingSink
from moerl.rollout.shared_memory import SharedMemory


class Taken:
    """Keeps copies of what it is given; refuses the version 13, breaks at 17."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, version: int, bucket: Iterable[tuple[str, Any]]) -> None:
        if version == 13:
            raise WeightSyncError("an unlucky version", seen=13)
        if version == 17:
            raise ZeroDivisionError("of the engine")
        self.tensors |= {name: tensor.clone() for name, tensor in bucket}
        self.versions.append(version)


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture(params=["memory", "connection"])
def receiver(taken: Taken, request: pytest.FixtureRequest) -> Iterator[BucketReceiver]:
    receiver = BucketReceiver(taken, "127.0.0.1", shares_memory=request.param == "memory")
    yield receiver
    receiver.close()


def push(sink: PushingSink, version: int, tensors: dict[str, torch.Tensor]) -> None:
    sink.begin_update(full(version, tensors))
    sink.receive(tensors.items())
    sink.end_update()


def test_a_bucket_arrives_bit_for_bit(taken: Taken, receiver: BucketReceiver):
    sink = PushingSink(receiver.address)
    sent = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.randn(4, 2).T,
        "c": torch.randn(()),
        "d": torch.zeros(0, 3),
    }
    push(sink, 4, {})
    push(sink, 4, sent)
    push(sink, 5, {"e": torch.randn(1000)})
    push(sink, 6, {"a": sent["a"]})
    assert taken.versions == [4, 4, 5, 6]
    for name, tensor in sent.items():
        assert torch.equal(taken.tensors[name], tensor)
        assert taken.tensors[name].dtype == tensor.dtype
    sink.close()


def test_what_the_engine_refuses_is_raised_by_the_sender_and_the_next_bucket_may_come(
    taken: Taken, receiver: BucketReceiver
):
    sink = PushingSink(receiver.address)
    with pytest.raises(WeightSyncError, match="an unlucky version; seen: 13"):
        push(sink, 13, {"a": torch.ones(2)})
    with pytest.raises(WeightSyncError, match="ZeroDivisionError: of the engine"):
        push(sink, 17, {"a": torch.ones(2)})
    push(sink, 18, {"a": torch.ones(3)})
    assert taken.tensors["a"].tolist() == [1, 1, 1]
    sink.close()


def test_two_senders_may_push_at_once(taken: Taken, receiver: BucketReceiver):
    sinks = [PushingSink(receiver.address) for _ in range(2)]

    def fill(number: int) -> None:
        for count in range(20):
            push(sinks[number], number, {f"{number}-{count}": torch.full((count,), float(number))})

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sorted(taken.versions) == [0] * 20 + [1] * 20
    for name, tensor in taken.tensors.items():
        assert tensor.tolist() == [float(name[0])] * int(name[2:])
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize("change", [-4, 4], ids=["cut", "longer"])
def test_a_bucket_of_another_length_than_announced_is_refused_and_the_next_one_taken(
    change: int, taken: Taken, monkeypatch: pytest.MonkeyPatch
):
    receiver = BucketReceiver(taken, "127.0.0.1", shares_memory=False)
    sink = PushingSink(receiver.address)

    with monkeypatch.context() as patched:
        wrong, connection = memoryview(bytes(12 + change)), sink._connection
        send = connection.send_bytes
        patched.setattr(connection, "send_bytes", lambda said: send(wrong if isinstance(said, memoryview) else said))
        with pytest.raises(WeightSyncError, match=rf"seen: {12 + change} bytes; expected: 12 bytes"):
            push(sink, 1, {"a": torch.zeros(3)})
    assert taken.versions == []
    push(sink, 2, {"a": torch.zeros(3)})
    assert taken.versions == [2]
    sink.close()
    receiver.close()


def test_a_stranger_without_the_key_is_turned_away(taken: Taken, receiver: BucketReceiver):
    with pytest.raises(AuthenticationError):
        PushingSink(msgspec.structs.replace(receiver.address, key=b"another"))
    sink = PushingSink(receiver.address)
    push(sink, 1, {"a": torch.ones(2)})
    assert taken.versions == [1]
    sink.close()


@pytest.mark.parametrize("said", SAYINGS.values(), ids=SAYINGS.keys())
def test_strangers_who_hold_their_connections_keep_no_sender_waiting_and_disturb_no_update(
    said: bytes, taken: Taken, receiver: BucketReceiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(admission, "HANDSHAKE_SECONDS", 600.0)
    held: list[PushingSink] = []

    def update() -> None:
        held.append(PushingSink(receiver.address))
        push(held[0], 1, {"a": torch.ones(2)})

    with calling(receiver.address.host, receiver.address.port, said, count=20) as callers:
        # A thread: if a stranger is in the way, this waits for ever.
        updating = threading.Thread(target=update, daemon=True)
        updating.start()
        updating.join(60.0)
        assert taken.versions == [1]
        for caller in callers:
            caller.close()
        push(held[0], 2, {"a": torch.ones(2)})
    assert taken.versions == [1, 2]
    held[0].close()


def test_the_key_does_not_show_in_messages(receiver: BucketReceiver):
    assert repr(receiver.address.key) not in repr(receiver.address)


def test_a_receiver_that_is_gone_is_an_error(receiver: BucketReceiver):
    sink = PushingSink(receiver.address)
    receiver.close()
    with pytest.raises(WeightSyncError, match="the engine's process is gone"):
        push(sink, 1, {"a": torch.ones(2)})
    with pytest.raises(WeightSyncError, match="the engine's process is gone"):
        PushingSink(receiver.address)
    sink.close()


def test_a_sender_that_is_gone_leaves_the_receiver_to_the_next_one(taken: Taken, receiver: BucketReceiver):
    first = PushingSink(receiver.address)
    first._connection.close()
    eventually(lambda: not receiver._sockets)
    second = PushingSink(receiver.address)
    push(second, 2, {"a": torch.ones(2)})
    assert taken.versions == [2]
    second.close()


def test_memory_of_a_sender_that_cannot_be_opened_is_an_error_there(
    tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
):
    receiver = BucketReceiver(taken, "127.0.0.1", shares_memory=True)
    sink = PushingSink(receiver.address)
    monkeypatch.setattr(SharedMemory, "path", str(tmp_path / "fd"))
    with pytest.raises(WeightSyncError, match=r"cannot open the memory.*No such file.*mount /proc"):
        push(sink, 1, {"a": torch.ones(2)})
    sink.close()
    receiver.close()
