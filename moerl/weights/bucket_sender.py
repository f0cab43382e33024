"""Calls of a sender's sink: in one thread, from two slots, each with a limit of time. Runs in senders; in
the controller `SinkThread` calls the engine, too.

    rank's thread     gathers into one slot, submits calls, waits for each `step_seconds` at most
    weight-sink       calls the sink, one call after the other, over all updates

A call that does not return in time becomes an error, but goes on: nobody can end it. Its thread is a daemon, so that
the process can still end; calls of the next update run once that call has returned.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moerl.contract.ports import WeightSink
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.weights.bucket import WeightBucket


@dataclass(slots=True, eq=False)
class SinkCall:
    """One call of a sink."""

    doing: str
    """Name of the call, for errors."""
    run: Callable[[], None]
    """The call itself; runs in the sink's thread."""
    started: float = 0.0
    """Time of its begin by `time.monotonic`; 0 before."""
    problem: BaseException | None = None
    """Error that it raised; None if it raised none, or has not ended."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when it has ended."""


class SinkThread:
    """The one thread that calls a sink, in the order of submission, over all updates.

    Args:
        name: of the sink, for errors.
        step_seconds: longest time of each call.
        thread_name: shown by debuggers.
    """

    def __init__(self, name: str, step_seconds: float, thread_name: str = "weight-sink") -> None:
        self.name, self.step_seconds = name, step_seconds
        self._calls: queue.SimpleQueue[SinkCall] = queue.SimpleQueue()
        self._current = ""
        threading.Thread(target=self._work, name=thread_name, daemon=True).start()

    def submit(self, doing: str, run: Callable[[], None]) -> SinkCall:
        call = SinkCall(doing, run)
        self._calls.put(call)
        return call

    def wait(self, call: SinkCall) -> BaseException | None:
        """Waits for a call; returns the error that it raised, or None. After `step_seconds`, counted from the beginning
        of the call, or from now if the call has not begun, returns a `WeightSyncError`."""
        begun = call.started or time.monotonic()
        if call.done.wait(max(0.0, begun + self.step_seconds - time.monotonic())):
            return call.problem
        busy = "" if call.started else f", busy with {self._current}"
        return WeightSyncError(
            f"weight update: {self.name} has not come back from {call.doing}",
            seen=f"{self.step_seconds:g} s without an answer{busy}",
            expected=f"every step within weights.step_seconds = {self.step_seconds:g}",
            remedy="see to the engine; another update can begin once it is back",
        )

    def call[T](self, doing: str, run: Callable[[], T]) -> T:
        """Submits a call, waits for it and returns its result.

        Raises:
            WeightSyncError: the call took longer than `step_seconds`.
            BaseException: the error of the call.
        """
        returned: list[T] = []
        problem = self.wait(self.submit(doing, lambda: returned.append(run())))
        if problem is not None:
            raise problem
        return returned[0]

    def failure(self, doing: str, problem: Exception) -> WeightSyncError:
        """Returns the error of an update in which the sink failed in a call."""
        return WeightSyncError(
            f"weight update: {self.name} failed in {doing}",
            seen=f"{type(problem).__name__}: {problem}",
            expected="a whole update",
            remedy="see to the engine; it keeps the version it had, unless it says otherwise",
        )

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            call.started = time.monotonic()
            self._current = call.doing
            try:
                call.run()
            except BaseException as problem:  # noqa: BLE001 - thread boundary: raised by the one that waits
                call.problem = problem
            call.done.set()


class BucketSender:
    """One update from a sender to its sink.

    Args:
        slot_bytes: of the largest bucket. Slots that grew would leave their old memory unused in the allocator.
        dtypes: as `CheckedSink.held_dtypes` of the engine; None if no checksums are wanted.

    Attributes:
        checksums: of every tensor that was sent, by checkpoint name; each is None if none are wanted.
    """

    def __init__(
        self,
        sink: WeightSink,
        thread: SinkThread,
        device: torch.device,
        slot_bytes: int,
        dtypes: Mapping[str, str] | None,
    ) -> None:
        self._sink, self._thread = sink, thread
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._sent: list[SinkCall] = []
        self._num_settled = 0
        self._is_abandoned = self._has_failed = False
        self._dtypes = dtypes
        self.checksums: dict[str, int | None] = {}
        self.num_bytes = 0
        self.send_seconds = self.end_seconds = 0.0

    def abandon(self) -> None:
        """Has the thread skip calls that it has not begun, and then the sink forget the update. Returns at once."""
        self._is_abandoned = True
        self._thread.submit("abandon_update", self._sink.abandon_update)

    def begin(self, update: WeightUpdate) -> BaseException | None:
        """Opens the update; returns the error of the sink, or None."""
        doing = f"begin_update({update.version})"
        return self._call(doing, lambda: self._sink.begin_update(update))

    def slot(self, num_bytes: int) -> Tensor:
        """Returns room for the next bucket: that of the bucket before last. Call after `settle(1)` found no problem."""
        return self._slots[len(self._sent) % 2][:num_bytes]

    def send(self, bucket: WeightBucket) -> None:
        """Submits a bucket to the sink's thread; returns at once."""
        self._sent.append(self._thread.submit(bucket.bucket.label, lambda: self._send(bucket)))

    def settle(self, at_most: int) -> BaseException | None:
        """Waits until the sink has at most so many buckets left to receive; returns its first error, or None."""
        problem = None
        while problem is None and len(self._sent) - self._num_settled > at_most:
            problem = self._thread.wait(self._sent[self._num_settled])
            self._num_settled += int(problem is None)
        return problem

    def end(self) -> BaseException | None:
        """Ends the update, after all buckets; returns the error of the sink, or None."""
        start = time.perf_counter()
        problem = self._call("end_update", self._sink.end_update)
        self.end_seconds = time.perf_counter() - start
        return problem

    # --- in the thread of the sink -----------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._is_abandoned or self._has_failed

    def _call(self, doing: str, run: Callable[[], None]) -> BaseException | None:
        def call() -> None:
            if not self._is_over:
                with self._naming(doing):
                    run()

        return self._thread.wait(self._thread.submit(doing, call))

    @contextlib.contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        """Raises an error of the sink as a `WeightSyncError` that names the sink and the call."""
        try:
            yield
        except Exception as problem:
            raise self._thread.failure(doing, problem) from problem

    def _send(self, bucket: WeightBucket) -> None:
        # Buckets after one that failed are not sent.
        if self._is_over:
            return
        self._has_failed = True
        start = time.perf_counter()
        _refuse_infinite(bucket)
        with self._naming(bucket.bucket.label):
            self._sink.receive(bucket)
        self.checksums |= (
            dict.fromkeys(entry.name for entry in bucket.bucket.entries)
            if self._dtypes is None
            else checksums(bucket, self._dtypes)
        )
        self.num_bytes += bucket.bucket.num_bytes
        self.send_seconds += time.perf_counter() - start
        self._has_failed = False


def _refuse_infinite(bucket: WeightBucket) -> None:
    # The whole bucket is checked first: two passes over many small tensors would take longer than sending them.
    if all(_is_finite(part) for part in bucket.parts()):
        return
    name = next(name for name, tensor in bucket if not _is_finite(tensor))
    raise WeightSyncError(
        f"weight '{name}' holds values that are not finite",
        expected="finite weights",
        remedy="lower optimizer.lr or resume from an earlier checkpoint",
    )


def _is_finite(tensor: Tensor) -> bool:
    """Returns True if smallest and largest value are finite; unlike `isfinite` this needs no memory."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
