"""From the trainer's export to an engine: whole sets of HF-named weights, one version at a time.

Runs in every trainer rank; the rank that hosts the engine passes it as the sink, the others pass None.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from moerl.contract.ports import WeightSink
from moerl.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One publication. num_bytes: bytes of the full tensors handed over."""

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float


def publish(tensors: Iterable[tuple[str, Tensor]], sink: WeightSink | None, version: int) -> PublishReport:
    """Hands all of `tensors` to `sink` as `version`.

    `tensors` is a collective of the trainer: it is iterated to the end on every rank, also when the sink fails.

    Raises:
        WeightSyncError: the export named a tensor twice, or the sink refused the set. The engine keeps its version.
    """
    start = time.perf_counter()
    counted = _Counted(tensors)
    if sink is None:
        counted.exhaust()
    else:
        try:
            sink.begin_update(version)
            sink.receive(counted)
        finally:
            counted.exhaust()
        if counted.twice:
            raise WeightSyncError(
                f"the export named '{counted.twice[0]}' more than once",
                seen=f"{len(counted.twice)} repeated names",
                expected="every tensor once",
                remedy="this is a bug in the weight export; report it with the model and layout",
            )
        sink.end_update()
    return PublishReport(version, len(counted.names), counted.num_bytes, time.perf_counter() - start)


class _Counted:
    """Iterates once over the export, counting names and bytes."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = iter(tensors)
        self.names: set[str] = set()
        self.twice: list[str] = []
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            if name in self.names:
                self.twice.append(name)
            self.names.add(name)
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    def exhaust(self) -> None:
        for _ in self:
            pass
