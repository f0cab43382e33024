"""Stream of an engine that answers turns of an earlier process from memory, and has new ones kept."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence

from moerl.buffer.turns import TurnMemory
from moerl.contract.ports import RolloutRecord, RolloutRequest, RolloutStream
from moerl.contract.trajectory import FinishReason, Trajectory
from moerl.episodes.join import check_answer
from moerl.errors import ContractError


class RememberingStream(RolloutStream):
    """Stream that asks the engine for turns that are not known.

    Args:
        stream: of the engine; closed with this one.
        memory: turns that are known, and the keeper of others.
    """

    def __init__(self, stream: RolloutStream, memory: TurnMemory) -> None:
        self._stream, self._memory = stream, memory
        self._ready: queue.SimpleQueue[RolloutRecord] = queue.SimpleQueue()
        # Written by the thread that asks before the answer can come, and read by the one that iterates.
        self._asked: dict[str, RolloutRequest] = {}
        self._known: dict[str, RolloutRecord] = {}

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        others: list[RolloutRequest] = []
        for request in requests:
            name = request.lineage.rollout_id
            turn = self._memory.known.pop(name, None)
            if turn is None or not turn.answers(request):
                self._asked[name] = request
                others.append(request)
                continue
            values = turn.values(request)
            self._known[name] = RolloutRecord(name, values["engine_id"], turn.newest_version, values)
            self._ready.put(self._known[name])
        # Also if there are no others: the iterator then looks at what is ready.
        self._stream.submit(others)

    def end(self) -> None:
        self._stream.end()

    def __iter__(self) -> Iterator[list[RolloutRecord]]:
        for records in self._stream:
            ready = [self._ready.get() for _ in range(self._ready.qsize())]
            yield [*ready, *records]

    def close(self) -> None:
        self._stream.close()

    def is_known(self, record: RolloutRecord) -> bool:
        """Returns whether a record of this stream is of an earlier process of the run."""
        return self._known.get(record.rollout_id) is record

    def keep(self, answer: Trajectory) -> None:
        """Has a checked answer of the engine kept, unless it is none to its request, or was aborted."""
        request = self._asked.pop(answer.lineage.rollout_id, None)
        if request is None or answer.finish_reason is FinishReason.ABORT:
            return
        try:
            check_answer(answer, request.prompt_ids)
        except ContractError:  # its episode is refused
            return
        self._memory.keep(answer, request)
