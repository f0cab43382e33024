from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moerl.contract.ports import CheckedSink
from moerl.errors import WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.ranks import weights
from moerl.ranks.weights import ThroughDisk, ThroughMemory
from moerl.rollout.beside.shared import SharedMemory, Written, decode_written
from moerl.weights.disk import DiskSink
from moerl.weights.remote import RemoteSink

TENSORS = {"of the first sender": torch.ones(3), "of another sender": torch.arange(4.0)}


class Engine:
    """Stands in for an engine; keeps what it was given."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.expected: Mapping[str, int] = {}

    def begin_update(self, version: int) -> None:
        self.tensors = {}

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.tensors |= dict(tensors)

    def end_update(self) -> None:
        """Every tensor has come."""

    def abandon_update(self) -> None:
        self.tensors = {}

    def held_dtypes(self) -> Mapping[str, str]:
        return dict.fromkeys(TENSORS, "bfloat16")

    def verify(self, sent: Mapping[str, int]) -> None:
        self.expected = sent


class Disk(Engine):
    """Stands in for the folder; what other senders wrote is there, too."""


def test_an_engine_is_compared_with_what_all_senders_wrote_in_its_own_precision(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "read_version", lambda folder, version: iter(TENSORS.items()))
    engine = Engine()
    sink = ThroughDisk(Path("weights"), cast(DiskSink, Disk()), cast(CheckedSink, engine))
    assert isinstance(sink, CheckedSink)
    sink.held_dtypes()
    sink.begin_update(3)
    sink.end_update()
    assert engine.tensors.keys() == TENSORS.keys()
    whole = checksums((name, tensor.bfloat16()) for name, tensor in TENSORS.items())
    sink.verify({"of the first sender": whole["of the first sender"]})
    assert engine.expected == whole


class Remote(Engine):
    """Stands in for the connection to an engine that reads memory: keeps what lies there when it is asked to wait."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self._memory, self._written = memory, list[Written]()

    def receive_written(self, what: bytes) -> None:
        self._written.append(decode_written(what))

    def wait(self) -> None:
        for written in self._written:
            self._memory.map(written.num_bytes)
            self.tensors |= {place.name: self._memory.view(place).clone() for place in written.places}
        self._written = []


def test_tensors_that_were_written_to_an_engines_memory_are_read_before_others_take_their_place():
    memory = SharedMemory()
    remote = Remote(memory)
    sink = ThroughMemory(cast(RemoteSink, remote), SharedMemory.of(memory.path))
    assert isinstance(sink, CheckedSink)
    sink.begin_update(1)
    for tensor in TENSORS.items():
        sink.receive([tensor])
    sink.end_update()
    remote.wait()
    assert {name: tensor.tolist() for name, tensor in remote.tensors.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    memory.close()


def test_a_rank_that_cannot_open_the_memory_of_an_engine_says_so(tmp_path: Path):
    with pytest.raises(WeightSyncError, match=r"cannot open the memory.*No such file.*mount /proc"):
        weights._memory_of_engine(str(tmp_path / "fd"))
