"""Weights of a folder, sent to servers that others started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moerl.contract.weight_update import WeightUpdate
from moerl.errors import EngineError
from moerl.kernels.checksum import checksums
from moerl.rollout import factory


class Servers:
    """Stands in for the engine on servers; calls: of it, in order. sent: the checksums that it was to compare with."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: dict[str, int] = {}

    def held_dtypes(self) -> Mapping[str, str]:
        self.calls.append("held_dtypes")
        return {"a": "bfloat16", "b": "float32"}

    def begin_update(self, update: WeightUpdate) -> None:
        self.calls.append(f"begin {update.version}")

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.calls += [f"receive {name}" for name, _ in tensors]

    def end_update(self) -> None:
        self.calls.append("end")

    def verify(self, sent: Mapping[str, int]) -> None:
        self.calls.append("verify")
        self.sent = dict(sent)

    def close(self) -> None:
        self.calls.append("close")


def send(servers: Any, folder: Path, **tensors: Tensor) -> None:
    save_file(tensors, folder / "model.safetensors")
    options: Any = SimpleNamespace(shapes={name: tuple(each.shape) for name, each in tensors.items()})
    factory.send_folder(servers, folder, 3, options)


def test_servers_are_compared_with_every_tensor_as_they_round_it_before_they_sample(tmp_path: Path) -> None:
    a, b, tied = torch.randn(3, 4), torch.randn(5), torch.randn(2, 2)
    servers = Servers()
    send(servers, tmp_path, a=a, b=b, tied=tied)
    # Asked for before the end: sampling then waits for the comparison.
    assert servers.calls == [
        "held_dtypes", "begin 3", "receive a", "receive b", "receive tied", "end", "verify"
    ]  # fmt: skip
    assert servers.sent == checksums({"a": a.bfloat16(), "b": b, "tied": tied}.items())


def test_an_engine_that_gets_quantized_weights_is_closed(tmp_path: Path) -> None:
    servers = Servers()
    with pytest.raises(EngineError, match="cannot be sent to a server"):
        send(servers, tmp_path, a=torch.zeros(2, dtype=torch.int8))
    assert servers.calls == ["held_dtypes", "begin 3", "close"]
