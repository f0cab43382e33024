"""The controller's side of an embedded engine in a process of its own.

Calls to `generate` may overlap, from any threads; each has its own records. Weights are swapped in between two decoding
steps, while sampling goes on: every token keeps the version that sampled it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moerl.contract.commands import ReceiverAddress
from moerl.contract.ports import EngineInfo, ReportedLayers, RolloutRecord, RolloutRequest, SamplingCosts
from moerl.contract.weight_update import WeightUpdate, require_open
from moerl.contract.wire import decode_records
from moerl.errors import EngineError, WeightSyncError, undoing
from moerl.rollout.engine_process.local import EngineProcess
from moerl.rollout.engine_process.messages import (
    Abort,
    CloseEngine,
    EngineAnswer,
    FinishedRollouts,
    Generate,
    StartEngine,
    Update,
    decode_for_controller,
    encode,
)
from moerl.rollout.engine_process.served import ENGINE_ID
from moerl.rollout.pushed import PushingSink
from moerl.rollout.requests import check_requests
from moerl.rollout.stream import CallStream, flattened, left_out


@dataclass(slots=True, eq=False)
class _Call:
    """One stream of requests that is not finished; `frames` ends with None if the engine is gone. A frame without
    content wakes the thread that waits for records."""

    number: int
    left: set[str] = field(default_factory=set[str])
    has_ended: bool = False
    frames: queue.SimpleQueue[tuple[bytes, list[str]] | None] = field(default_factory=queue.SimpleQueue)


class ProcessEngine:
    """A `PolicyEngine` whose model is in another process, which dies with this one.

    Args:
        start: what the process loads.
        process: just started; closed with the engine.

    Attributes:
        unfinished: rollout ids of the latest `generate` call to end that yielded no record.
        costs: of weight updates, summed up.
        description, is_on_device: as in `EmbeddedEngine`.
        receiver: address to which senders push the buckets of an update that was begun here.

    Raises:
        EngineError: the model cannot be loaded, or the process ended.
    """

    def __init__(self, start: StartEngine, process: EngineProcess) -> None:
        self._spec, self._version, self._process = start.spec, start.version, process
        self.unfinished: list[str] = []
        self.costs = SamplingCosts()
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._answers: queue.SimpleQueue[EngineAnswer | None] = queue.SimpleQueue()
        # Messages go out one at a time; so do calls of an update, which may come from any thread.
        self._sending, self._updating = threading.Lock(), threading.Lock()
        self._has_ended = self._is_closed = False
        self._staged: WeightUpdate | None = None
        self._dtypes: Mapping[str, str] = {}
        self._pushing: PushingSink | None = None
        self._reader = threading.Thread(target=self._read, name="engine-records", daemon=True)
        self._reader.start()
        with undoing(self.close):  # an interrupt, too, leaves no process behind
            start = msgspec.structs.replace(start, host=process.host, shares_memory=process.is_here)
            answer = self._ask(start, EngineError)
        self._layer_numbers, self._max_positions = tuple(answer.layer_numbers), answer.max_positions
        self.description, self.is_on_device = answer.description, answer.is_on_device
        assert answer.receiver is not None
        self.receiver: ReceiverAddress = answer.receiver

    def handshake(self) -> EngineInfo:
        return EngineInfo(ENGINE_ID, self._spec, self._version, ReportedLayers.MOE, self._layer_numbers)

    # --- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        """Yields one record per request, in the order in which they finish. Sampling starts at once.

        Raises:
            EngineError: at once, if a request is refused, the engine has no verified weights or the process is gone; at
                a later record, if the process ends.
        """
        return flattened(self.stream(), requests)

    def stream(self) -> CallStream:
        """Returns a stream of requests, which are sampled as they come."""
        with self._sending:
            call, self._num_calls = _Call(self._num_calls), self._num_calls + 1
            self._calls[call.number] = call

        def put(requests: Sequence[RolloutRequest] | None) -> None:
            if requests:
                self._submit(call, requests)
            else:
                call.has_ended = call.has_ended or requests is None
                call.frames.put((b"", []))

        return CallStream(put, self._records(call))

    def _submit(self, call: _Call, requests: Sequence[RolloutRequest]) -> None:
        if self._version < 0:
            raise EngineError(
                "the engine's process: no weights that were verified",
                seen=f"policy version {self._version}",
                expected="at least 0",
                remedy="send a whole weight update",
            )
        check_requests(requests, self._spec, self._max_positions)
        names = {request.lineage.rollout_id for request in requests}
        with self._sending:
            call.left |= names
        with undoing(lambda: call.left.difference_update(names)):
            self._send(Generate(call.number, list(requests)))

    def _records(self, call: _Call) -> Generator[list[RolloutRecord]]:
        unfinished: list[str] = []
        try:
            while call.left or not call.has_ended:
                found = call.frames.get()
                if found is None:
                    raise self._gone()
                frame, without = found
                call.left -= set(without)
                unfinished += without
                if not frame:
                    yield [left_out(name) for name in without]
                for record in decode_records(frame, spec=self._spec) if frame else ():
                    call.left.discard(record.rollout_id)
                    yield [record]
        finally:
            if call.left and not self._has_ended:
                with contextlib.suppress(EngineError):  # it is gone, and samples nothing
                    self._send(Abort(sorted(call.left)))
            self.unfinished = [*unfinished, *call.left]
            self._calls.pop(call.number, None)

    def peak_rss_bytes(self) -> int:
        """Returns the peak resident memory of the process. Raises `EngineError` if the process is gone."""
        return self._update(Update("memory")).peak_rss_bytes

    def abort(self, rollout_ids: Collection[str] | None = None) -> None:
        """Finishes the named rollouts (all when None); those without a token yield no record."""
        names = rollout_ids
        if names is None:
            names = [name for call in list(self._calls.values()) for name in call.left]
        if names:
            self._send(Abort(sorted(names)))

    def close(self) -> None:
        """Ends the process. Calls that wait for records raise `EngineError`."""
        if not self._is_closed:
            self._is_closed = True
            if self._pushing is not None:
                self._pushing.close()
            with contextlib.suppress(EngineError):
                self._send(CloseEngine())
            self._process.close()
            self._reader.join()
            self._process.release()

    # --- weights -----------------------------------------------------------------------------------------------------

    def begin_update(self, update: WeightUpdate) -> None:
        """Begins an update; one that was never ended is forgotten. Returns at once: the process begins the update after
        a decoding step, and buckets wait there until then. If the process refuses the update, they raise its error, and
        so does `end_update`."""
        with self._updating:
            self._send(Update("begin", update))
            self._staged = update

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Pushes one bucket from this process."""
        update = require_open(self._staged)
        with self._updating, undoing(self._check_alive):
            if self._pushing is None:
                self._pushing = PushingSink(self.receiver)
            self._pushing.begin_update(update)
            self._pushing.receive(tensors)

    def end_update(self) -> None:
        update = require_open(self._staged)
        self._staged = None
        answer = self._update(Update("end"))
        self._version = update.version
        self.costs.interrupted, self.costs.stalled_seconds = answer.interrupted, answer.stalled_seconds

    def abandon_update(self) -> None:
        self._staged = None
        self._update(Update("abandon"))

    def held_dtypes(self) -> Mapping[str, str]:
        # Asked once: an answer waits for a decoding step.
        if not self._dtypes:
            self._dtypes = self._update(Update("held_dtypes")).dtypes
        return self._dtypes

    def verify(self, sent: Mapping[str, int]) -> None:
        """Has the process compare weights (`CheckedSink.verify`). If they differ, new requests are refused."""
        try:
            self._update(Update("verify", checksums=dict(sent)))
        except WeightSyncError:
            self._version = -1
            raise

    def _update(self, update: Update) -> EngineAnswer:
        with self._updating:
            return self._ask(update, WeightSyncError)

    # --- the process -------------------------------------------------------------------------------------------------

    def _ask(self, message: StartEngine | Update, kind: type[EngineError | WeightSyncError]) -> EngineAnswer:
        self._send(message)
        answer = self._answers.get()
        if answer is None:
            raise self._gone()
        if answer.problem:
            raise (WeightSyncError if answer.is_sync else kind)(answer.problem)
        return answer

    def _send(self, message: StartEngine | Generate | Abort | Update | CloseEngine) -> None:
        try:
            with self._sending:
                self._process.send(encode(message))
        except OSError as error:
            raise self._gone() from error

    def _read(self) -> None:
        """Hands answers and records of the process to the calls that wait for them; runs in a thread of its own until
        the process ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message, frame = self._process.receive()
                match decode_for_controller(message):
                    case EngineAnswer() as answer:
                        self._answers.put(answer)
                    case FinishedRollouts(number, without):
                        call = self._calls.get(number)
                        if call is not None:
                            call.frames.put((frame, without))
        self._has_ended = True
        self._answers.put(None)
        for call in list(self._calls.values()):
            call.frames.put(None)

    def _check_alive(self) -> None:
        if self._has_ended:
            raise self._gone()

    def _gone(self) -> EngineError:
        return EngineError(
            "the engine's process is gone",
            seen=self._process.describe_end(),
            expected="an engine that samples until the run ends",
            remedy="resume the run from its last checkpoint",
        )
