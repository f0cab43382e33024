"""Steps timed in turns, and counts of what a step does. Runs in trainer ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _report import Result
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One step's time by another's, over pairs of neighbours in time.

    median: of the ratios of all pairs. low, high: bounds of its 95% bootstrap interval. seconds: medians of the two.
    """

    median: float
    low: float
    high: float
    seconds: tuple[float, float]

    @classmethod
    def of(cls, taken_N2: NDArray[np.floating]) -> Ratio:
        """taken_N2: seconds of both steps in N pairs, the numerator's first."""
        ratios_N = taken_N2[:, 0] / taken_N2[:, 1]
        mine, theirs = np.median(taken_N2, axis=0).tolist()
        return cls(float(np.median(ratios_N)), *bootstrap_interval(ratios_N), (mine, theirs))


@dataclass(frozen=True, slots=True)
class Ratios:
    """The same pairs by both clocks: wall time, and CPU time of the process.

    Without a GPU the step of one process is one thread that never waits, so its CPU time is what its wall time would be
    on an idle machine.
    """

    wall: Ratio
    cpu: Ratio
    num_pairs: int


def paired_ratio(step: Step, baseline: Step, num_pairs: int) -> Ratios:
    """Times both in the order ABBA: steady drift of the machine cancels, a disturbance spoils one pair, not the median.

    Both run once before, untimed.
    """
    step()
    baseline()
    taken = []
    for pair in range(num_pairs):
        order = (step, baseline) if pair % 2 == 0 else (baseline, step)
        first, second = (seconds(function) for function in order)
        taken.append((first, second) if pair % 2 == 0 else (second, first))
    taken_N2C = np.array(taken)
    return Ratios(Ratio.of(taken_N2C[:, :, 0]), Ratio.of(taken_N2C[:, :, 1]), num_pairs)


def bootstrap_interval(values_N: NDArray[np.floating], num_resamples: int = 10_000) -> tuple[float, float]:
    """The 95% percentile interval of the median under resampling with replacement (Efron 1979); a fixed seed."""
    draws = np.random.default_rng(0).choice(values_N, (num_resamples, len(values_N)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(low), float(high)


def seconds(function: Step) -> tuple[float, float]:
    """Wall time, and CPU time of this process."""
    _finish()
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    _finish()
    return time.perf_counter() - wall, time.process_time() - cpu


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- counts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """Work of one step: torch operations called, bytes of their outputs, and floating-point operations of products.

    Views count as operations without bytes of their own.
    """

    calls: int
    output_bytes: int
    flops: int


class _Counter(TorchDispatchMode):
    """Counts every operation below autograd, the backward pass and the optimizer included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.output_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view:
            outputs = out if isinstance(out, tuple | list) else (out,)
            self.output_bytes += sum(each.nbytes for each in outputs if isinstance(each, Tensor))
        return out


def count(step: Step) -> Counts:
    """Counts of one call."""
    with FlopCounterMode(display=False) as products:
        step()
    with _Counter() as counter:
        step()
    return Counts(counter.calls, counter.output_bytes, products.get_total_flops())


# --- results ---------------------------------------------------------------------------------------------------------


def ratio_results(name: str, ratios: Ratios, goal: float | None) -> list[Result]:
    """The ratio by both clocks with its interval, and the upper end of that against the goal: of wall time on a GPU,
    of CPU time without one."""
    on_gpu = torch.cuda.is_available()
    results = []
    for clock, ratio, decides in (("wall", ratios.wall, on_gpu), ("CPU", ratios.cpu, not on_gpu)):
        mine, theirs = ratio.seconds
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        results.append(
            Result(
                f"{name}, {clock} time: {mine:.3g} s / {theirs:.3g} s, 95% of {ratios.num_pairs} pairs: {interval}",
                ratio.median,
                unit="ratio",
                spread=ratio.high - ratio.low,
            )
        )
        if goal is not None and decides:
            bound = f"{name}, {clock} time: 95% upper bound"
            results.append(Result(bound, ratio.high, f"<= {goal}", ratio.high <= goal, "ratio"))
    return results


def count_results(name: str, on: Counts, off: Counts) -> list[Result]:
    """Torch operations, output bytes and products of a step, on by off; the difference stands in the name."""
    calls, moved = on.calls - off.calls, on.output_bytes - off.output_bytes
    return [
        Result(f"{name}: torch operations ({calls:+,} of {off.calls:,})", on.calls / off.calls, unit="ratio"),
        Result(f"{name}: bytes written ({moved:+,})", on.output_bytes / off.output_bytes, unit="ratio"),
        Result(f"{name}: products ({on.flops - off.flops:+,} FLOP)", on.flops / off.flops, unit="ratio"),
    ]
