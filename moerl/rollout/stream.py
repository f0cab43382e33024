"""Streams of requests: that of an engine in the same process, and what all have in common."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator, Sequence

from moerl.contract.ports import RolloutRecord, RolloutRequest, RolloutStream
from moerl.contract.reasons import Reason
from moerl.errors import ContractError, closing

Take = Callable[[bool], Sequence[RolloutRequest] | None]
"""Called before each step, with True if nothing is left to sample; returns new requests, None to end at once."""


def left_out(rollout_id: str) -> RolloutRecord:
    """Returns the record of a rollout that was aborted before its first token: of streams alone, whose users wait for
    each request."""
    refusal = ContractError(Reason.NOTHING_SAMPLED, field="sampled", seen="no token", expected="at least one")
    return RolloutRecord(rollout_id, "", -1, {}, refusal)


def is_left_out(record: RolloutRecord) -> bool:
    """Returns whether `left_out` made the record."""
    return record.refusal is not None and record.refusal.reason == Reason.NOTHING_SAMPLED and not record.values


def flattened(stream: RolloutStream, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
    """Submits requests, which are all of a stream; returns its records one by one, without those of `left_out`. The
    iterator closes the stream at its end."""
    stream.submit(requests)
    stream.end()
    return _one_by_one(stream)


def _one_by_one(stream: RolloutStream) -> Generator[RolloutRecord]:
    with closing(stream):
        for records in stream:
            yield from (record for record in records if not is_left_out(record))


class CallStream:
    """A `RolloutStream` of an engine.

    Args:
        put: takes requests in any thread, None at the end; raises `EngineError` for those that the engine refuses.
        records: yields the records of what was put.
    """

    def __init__(
        self, put: Callable[[Sequence[RolloutRequest] | None], None], records: Generator[list[RolloutRecord]]
    ) -> None:
        self._put, self._records = put, records

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._put(requests)

    def end(self) -> None:
        self._put(None)

    def __iter__(self) -> Iterator[list[RolloutRecord]]:
        return self._records

    def close(self) -> None:
        self._records.close()


class EngineStream(CallStream):
    """A `RolloutStream` of an engine in the same process; the thread that iterates it samples.

    Args:
        check: raises `EngineError` for requests that the engine refuses. Any thread.
        serve: samples what it takes; yields the records of each step.
        unfinished: takes the ids of rollouts that were aborted before their first token since its last call.
    """

    def __init__(
        self,
        check: Callable[[Sequence[RolloutRequest]], None],
        serve: Callable[[Take], Generator[list[RolloutRecord]]],
        unfinished: Callable[[], Sequence[str]],
    ) -> None:
        super().__init__(self._add, self._with_left_out(serve(self._take)))
        self._check, self._unfinished = check, unfinished
        self._requests: queue.SimpleQueue[Sequence[RolloutRequest] | None] = queue.SimpleQueue()
        self._has_ended = False

    def _add(self, requests: Sequence[RolloutRequest] | None) -> None:
        if requests:
            self._check(requests)
        self._requests.put(requests)

    def _with_left_out(self, steps: Generator[list[RolloutRecord]]) -> Generator[list[RolloutRecord]]:
        with closing(steps):
            for records in steps:
                yield [*records, *map(left_out, self._unfinished())]

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
