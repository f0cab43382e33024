"""Peak memory of a forward and backward pass on a CPU, from torch's own allocator."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Pass:
    """Cost of one pass. peak_bytes: most bytes of tensors alive at a time beyond those before the pass, the excluded
    gradient not counted. cpu_seconds: CPU time of this process."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure_pass(step: Callable[[], Sequence[Tensor]], excluded: int | None = None) -> Pass:
    """Runs `step`, which returns tensors that it allocated; `excluded`: which of them, a gradient that all contestants
    make, is counted apart; None if none is."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        wall, cpu = time.perf_counter(), time.process_time()
        gradients = step()
        cpu_seconds, wall_seconds = time.process_time() - cpu, time.perf_counter() - wall
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["args"]["Ev Idx"])
    own = None if excluded is None else gradients[excluded]
    return Pass(wall_seconds, cpu_seconds, _peak([event["args"] for event in events], own))


def _peak(events: Sequence[dict[str, int]], excluded: Tensor | None) -> int:
    """Largest running total without the last allocation at the address of `excluded`."""
    own = -1
    if excluded is not None:
        address, size = excluded.untyped_storage().data_ptr(), excluded.untyped_storage().nbytes()
        own = max(index for index, event in enumerate(events) if (event["Addr"], event["Bytes"]) == (address, size))
    alive = peak = 0
    for index, event in enumerate(events):
        alive += 0 if index == own else event["Bytes"]
        peak = max(peak, alive)
    return peak
