"""Calls that a step makes to the device: kernels launched, waits of the host, copies; and the profile of it as text.

On a GPU from torch's profiler. On a CPU operations below autograd are counted instead: each that computes is taken for
a launch, each that reads a value on the host, or whose shape depends on values, for a synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from _report import Result
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 15
"""Lines of a table."""
_SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Without cudaDeviceSynchronize, which the profiler itself calls as it ends."""
_LAUNCHES = ("LaunchKernel", "GraphLaunch")
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
_READS = (
    "_local_scalar_dense",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
)


@dataclass(frozen=True, slots=True)
class Calls:
    """Numbers of calls of one step."""

    launches: int
    synchronisations: int
    copies: int
    """Between host and device; 0 on a CPU."""
    device_seconds: float | None
    """Time in which the device ran a kernel or a copy, however many at once; None on a CPU."""
    table: str
    """The operations and kernels that took longest, by time of the host and of the device."""

    def results(self, name: str) -> list[Result]:
        """Numbers as results whose names begin with `name`."""
        found = [
            Result(f"{name}: launches", self.launches, unit="calls"),
            Result(f"{name}: synchronisations", self.synchronisations, unit="calls"),
        ]
        if self.device_seconds is not None:
            found.append(Result(f"{name}: copies between host and device", self.copies, unit="calls"))
            found.append(Result(f"{name}: device busy", self.device_seconds, unit="s"))
        return found


def count_calls(step: Callable[[], object], device: str) -> Calls:
    """Counts calls of `step`, which has run before, so that nothing is compiled or allocated for the first time."""
    return _on_cuda(step) if device == "cuda" else _on_cpu(step)


def _on_cuda(step: Callable[[], object]) -> Calls:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    single, events = profiler.events(), profiler.key_averages()
    assert single is not None
    counts = {event.key: event.count for event in events}

    def number(is_meant: Callable[[str], bool]) -> int:
        return sum(count for key, count in counts.items() if is_meant(key))

    return Calls(
        launches=number(lambda key: key.startswith("cu") and any(part in key for part in _LAUNCHES)),
        synchronisations=number(lambda key: key in _SYNCHRONISATIONS),
        copies=number(lambda key: key.startswith(_COPIES)),
        device_seconds=busy_seconds(single),
        table="\n".join(_table(events, order) for order in ("self_device_time_total", "self_cpu_time_total")),
    )


def busy_seconds(events: Iterable[Any]) -> float:
    """Length of the union of the device's events: kernels of several streams overlap."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6


def _on_cpu(step: Callable[[], object]) -> Calls:
    with _Counter() as counter:
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    table = _table(profiler.key_averages(), "self_cpu_time_total")
    return Calls(counter.launches, counter.synchronisations, 0, None, table)


def _table(events: Any, order: str) -> str:
    return events.table(sort_by=order, row_limit=ROWS, max_name_column_width=60)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches = self.synchronisations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS or (name.startswith("index") and _has_mask(args)):
            self.synchronisations += 1
        elif not func.is_view:
            self.launches += 1
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    """Tells whether an operation is indexed with booleans, whose number decides about a shape."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
