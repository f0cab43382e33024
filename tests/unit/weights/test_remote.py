"""A sink in another process, by way of a connection: the same calls, the same tensors, the same errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import AuthenticationError
from typing import Any

import pytest
import torch
from waiting import eventually

from moerl.errors import WeightSyncError
from moerl.weights import remote as module
from moerl.weights.remote import RemoteSink, SinkServer


class FakeSink:
    """Remembers its calls; refuses the version 13, breaks at 17."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def begin_update(self, version: int) -> None:
        if version == 13:
            raise WeightSyncError("an unlucky version", seen=13)
        if version == 17:
            raise ZeroDivisionError("of the engine")
        self.calls.append(("begin", version))

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.tensors |= dict(tensors)

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
    assert sink.calls == [("begin", 4), "end", ("verify", {"a": 2**63 + 1})]
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
