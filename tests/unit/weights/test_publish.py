from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.weights.publish import publish

WEIGHTS = {"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.zeros(5)}


class Export:
    """A collective export: other ranks would wait if this one stopped before its end."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self.ended = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors
        self.ended = True


class Sink:
    """Records what it is told; `fail_at` names the tensor at which receiving fails."""

    def __init__(self, fail_at: str = "") -> None:
        self.fail_at = fail_at
        self.calls: list[str] = []

    def begin_update(self, version: int) -> None:
        self.calls.append(f"begin {version}")

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, _ in tensors:
            self.calls.append(name)
            if name == self.fail_at:
                raise WeightSyncError(f"no room for {name}")

    def end_update(self) -> None:
        self.calls.append("end")


def test_the_sink_gets_every_tensor_once_between_begin_and_end() -> None:
    sink = Sink()
    report = publish(Export(WEIGHTS.items()), sink, 7)
    assert sink.calls == ["begin 7", "a", "b", "c", "end"]
    assert (report.version, report.num_tensors, report.num_bytes) == (7, 3, 12 + 8 + 20)


def test_a_rank_without_an_engine_still_takes_part_in_the_export() -> None:
    export = Export(WEIGHTS.items())
    assert publish(export, None, 7).num_tensors == 3
    assert export.ended


def test_a_sink_that_fails_exhausts_the_export_and_is_not_told_to_take_the_version() -> None:
    export, sink = Export(WEIGHTS.items()), Sink(fail_at="b")
    with pytest.raises(WeightSyncError, match="no room for b"):
        publish(export, sink, 7)
    assert export.ended
    assert "end" not in sink.calls


def test_a_sink_that_refuses_to_begin_exhausts_the_export() -> None:
    export, sink = Export(WEIGHTS.items()), Sink()

    def refuse(version: int) -> None:
        raise WeightSyncError(f"an update to {version} is under way")

    sink.begin_update = refuse  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="under way"):
        publish(export, sink, 7)
    assert export.ended


def test_a_name_that_comes_twice_is_refused_before_the_version_is_taken() -> None:
    export, sink = Export([*WEIGHTS.items(), ("a", torch.ones(3))]), Sink()
    with pytest.raises(WeightSyncError, match="'a' more than once"):
        publish(export, sink, 7)
    assert export.ended
    assert "end" not in sink.calls
