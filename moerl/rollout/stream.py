"""Streams of requests: that of an engine in the same process, and what all have in common."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator, Sequence

from moerl.contract.ports import RolloutRecord, RolloutRequest, RolloutStream
from moerl.errors import closing

Take = Callable[[bool], Sequence[RolloutRequest] | None]
"""Called before each step, with True if nothing is left to sample; returns new requests, None if no more will come."""


def flattened(stream: RolloutStream) -> Generator[RolloutRecord]:
    """Yields the records of a stream one by one; closes it at the end."""
    with closing(stream):
        for records in stream:
            yield from records


class EngineStream:
    """A `RolloutStream` of an engine in the same process; the thread that iterates it samples.

    Args:
        check: raises `EngineError` for requests that the engine refuses. Any thread.
        serve: samples what it takes; yields the records of each step.
    """

    def __init__(
        self,
        check: Callable[[Sequence[RolloutRequest]], None],
        serve: Callable[[Take], Generator[list[RolloutRecord]]],
    ) -> None:
        self._check = check
        self._requests: queue.SimpleQueue[Sequence[RolloutRequest] | None] = queue.SimpleQueue()
        self._has_ended = False
        self._records = serve(self._take)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        if requests:
            self._check(requests)
        self._requests.put(requests)

    def end(self) -> None:
        self._requests.put(None)

    def __iter__(self) -> Iterator[list[RolloutRecord]]:
        return self._records

    def close(self) -> None:
        self._records.close()

    def _take(self, is_idle: bool) -> Sequence[RolloutRequest] | None:
        """Returns the requests that have come; waits for a call of `submit` or `end` if nothing is left to sample."""
        found: list[RolloutRequest] = []
        must_wait = is_idle
        while not self._has_ended:
            try:
                requests = self._requests.get(block=must_wait)
            except queue.Empty:
                return found
            self._has_ended = requests is None
            found += requests or ()
            must_wait = False
        return None if is_idle and not found else found
