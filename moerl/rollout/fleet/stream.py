"""Stream of requests to the servers of an engine: they are asked from the engine's event loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.processes.loop_thread import LoopThread
from moerl.rollout.fleet.request_loop import Call, Rollout


class FleetStream:
    """A `RolloutStream` of servers.

    Args:
        check: raises `EngineError` for requests that the engine refuses. Any thread.
        loop: event loop of the engine.
        serve: asks for what is added to a call, and yields its records; gets the ids of rollouts without a record.
    """

    def __init__(
        self,
        check: Callable[[Sequence[RolloutRequest]], None],
        loop: LoopThread,
        serve: Callable[[Call, dict[str, None]], Generator[list[RolloutRecord]]],
    ) -> None:
        self._check, self._loop = check, loop
        self._call, self._left = Call(), dict[str, None]()
        self._records = serve(self._call, self._left)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        if requests:
            self._check(requests)
            self._left |= dict.fromkeys(request.lineage.rollout_id for request in requests)
        self._loop.call(self._call.add, [Rollout(request) for request in requests])

    def end(self) -> None:
        self._loop.call(self._call.add, None)

    def __iter__(self) -> Iterator[list[RolloutRecord]]:
        return self._records

    def close(self) -> None:
        self._records.close()
