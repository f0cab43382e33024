"""Time spans of a step and peak memory. Any process."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

from moerl.telemetry.metrics import SPANS


class Stopwatch:
    """Stopwatch that adds up the seconds of named spans. Spans may nest; each counts its whole time.

    Args:
        clock: returns seconds, never falling.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block, also if the block fails. Raises `ValueError` for an unknown name."""
        if name not in SPANS:
            raise ValueError(f"span {name!r} is not one of {list(SPANS)}; add it to moerl/telemetry/metrics.py")
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def seconds(self, name: str) -> float:
        """Returns the seconds of a span since the last `lap`."""
        return self._seconds.get(name, 0.0)

    def lap(self) -> dict[str, float]:
        """Returns the seconds since the last lap as metrics (``seconds/<span>``); starts again from zero."""
        metrics = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
