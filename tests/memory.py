"""How much memory Python objects and arrays take at most while something is done."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yields a function that says the most bytes that were taken at once since, on top of what was taken before."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    most = 0

    def peak() -> int:
        return (tracemalloc.get_traced_memory()[1] - before) if tracemalloc.is_tracing() else most

    try:
        yield peak
    finally:
        most = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
