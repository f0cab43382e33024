"""A weight update from trainer to engines: gather, hand over, check, one version at a time. Runs in every trainer rank.

While a root's sink takes one bucket (in a thread of its own), the next one is gathered into the other of two slots.
Gathering is a collective: it goes on to its end on every rank also when a sink has failed; then all ranks learn of the
failure and raise, and engines keep the version they had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.contract.ports import CheckedSink, WeightSink
from moerl.errors import WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.weights.bucket import WeightBucket, check_shards
from moerl.weights.gather import TakeSlot
from moerl.weights.plan import SyncPlan

_NAMED = 5


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One publication, as this rank saw it.

    num_tensors, num_bytes: that this rank handed to its sink. received_bytes, needed_bytes: as in `RootGather`.
    gather_seconds: without waiting for a free slot. send_seconds: of the sink taking buckets. seconds: of all.
    """

    version: int
    num_tensors: int
    num_bytes: int
    received_bytes: int
    needed_bytes: int
    gather_seconds: float
    send_seconds: float
    seconds: float


class Gatherer(Protocol):
    """See `RootGather`."""

    needed_bytes: int
    received_bytes: int

    def gather(self, shards: Mapping[str, Tensor], take_slot: TakeSlot) -> Iterator[WeightBucket | None]: ...


class Publisher:
    """Publishes versions by one plan.

    Args:
        rank: this rank.
        gatherer: of the plan, on every rank the same kind.
        device: of the weights.
        sink: where this rank is a root of the plan; None elsewhere.
    """

    def __init__(
        self, plan: SyncPlan, rank: int, gatherer: Gatherer, device: torch.device, sink: WeightSink | None
    ) -> None:
        if (rank in plan.options.roots) != (sink is not None):
            raise WeightSyncError(
                f"rank {rank}: a sink where no root is, or a root without one",
                seen="a sink" if sink is not None else "no sink",
                expected=f"sinks on ranks {list(plan.options.roots)}",
                remedy="make the plan with the ranks that hold sinks as its roots",
            )
        self._plan, self._rank, self._gatherer, self._device, self._sink = plan, rank, gatherer, device, sink
        self._slot_bytes = max((bucket.num_bytes for bucket in plan.buckets if bucket.root == rank), default=0)

    def publish(self, shards: Mapping[str, Tensor], version: int, *, verify: bool = True) -> PublishReport:
        """Hands all weights to the sinks as `version`. A collective of all trainer ranks.

        Args:
            shards: this rank's weights by the names of the plan; they must not change meanwhile.
            verify: compare checksums with what the engine then holds, where its sink is a `CheckedSink`.

        Raises:
            WeightSyncError: on every rank: a rank holds other tensors than planned, a weight is not finite, or a sink
                refused; engines keep their version. Or checksums disagree; that engine then serves nothing.
        """
        start = time.perf_counter()
        with _Handover(self._sink, self._device, self._slot_bytes, verify=verify) as handover:
            self._agree(handover.begin(lambda: check_shards(self._plan, self._rank, shards), version), "begin")
            for bucket in self._gatherer.gather(shards, handover.take_slot):
                if bucket is not None:
                    handover.send(bucket)
            gathered = time.perf_counter() - start
            self._agree(handover.drain(), "transfer")
            first = self._rank == self._plan.options.roots[0]
            self._agree(None if first else handover.end(), "end")
            self._agree(handover.end() if first else None, "end")
        return PublishReport(
            version=version,
            num_tensors=handover.num_tensors,
            num_bytes=handover.num_bytes,
            received_bytes=self._gatherer.received_bytes,
            needed_bytes=self._gatherer.needed_bytes,
            gather_seconds=gathered - handover.wait_seconds,
            send_seconds=handover.send_seconds,
            seconds=time.perf_counter() - start,
        )

    def _agree(self, problem: BaseException | None, stage: str) -> None:
        """Raises on every rank where one has a problem."""
        failed = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=self._device)
        failed[self._rank] = int(problem is not None)
        if dist.get_world_size() > 1:
            dist.all_reduce(failed)
        if problem is not None:
            raise problem
        ranks = failed.nonzero()[:, 0].tolist()
        if ranks:
            raise WeightSyncError(
                f"weight update: {stage} failed on other ranks",
                seen=f"ranks {ranks}",
                expected="success on all ranks",
                remedy="look at the error of the first of them",
            )


class _Handover:
    """A root's side towards its sink: two slots, one thread that calls the sink. Without a sink nothing happens.

    slot_bytes: of the largest bucket. Slots that grew would leave what they were behind in the allocator.
    """

    def __init__(self, sink: WeightSink | None, device: torch.device, slot_bytes: int, *, verify: bool) -> None:
        self._sink = sink
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._sent: list[Future[None]] = []
        self._failed = False
        self._checked = sink if verify and isinstance(sink, CheckedSink) else None
        self._dtypes: Mapping[str, str] = {}
        self._checksums: dict[str, int] = {}
        self.num_tensors = 0
        self.num_bytes = 0
        self.wait_seconds = 0.0
        self.send_seconds = 0.0

    def __enter__(self) -> _Handover:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sink")
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def begin(self, check: Callable[[], None], version: int) -> BaseException | None:
        """Checks this rank's weights and opens the update."""

        def run() -> None:
            check()
            if self._sink is not None:
                self._sink.begin_update(version)
            if self._checked is not None:
                self._dtypes = self._checked.held_dtypes()

        return self._thread.submit(run).exception()

    def take_slot(self, num_bytes: int) -> Tensor:
        """The slot of the bucket before last, once the sink has taken it."""
        number = len(self._sent)
        start = time.perf_counter()
        if number >= 2:
            self._sent[number - 2].exception()
        self.wait_seconds += time.perf_counter() - start
        return self._slots[number % 2][:num_bytes]

    def send(self, bucket: WeightBucket) -> None:
        """Lets the sink take a bucket; returns at once."""
        self._sent.append(self._thread.submit(self._send, bucket))

    def _send(self, bucket: WeightBucket) -> None:
        assert self._sink is not None
        if self._failed:
            return
        # Until it has succeeded: what comes after a failure is not sent.
        self._failed = True
        start = time.perf_counter()
        _refuse_infinite(bucket)
        self._sink.receive(bucket)
        if self._checked is not None:
            self._checksums |= checksums(_cast(bucket, self._dtypes))
        self.num_tensors += len(bucket.bucket.entries)
        self.num_bytes += bucket.bucket.num_bytes
        self.send_seconds += time.perf_counter() - start
        self._failed = False

    def drain(self) -> BaseException | None:
        """Waits until the sink has taken every bucket; the first problem, if any."""
        return next((problem for problem in [sent.exception() for sent in self._sent] if problem is not None), None)

    def end(self) -> BaseException | None:
        """Ends the update and checks what the engine then holds."""
        return self._thread.submit(self._end).exception()

    def _end(self) -> None:
        if self._sink is None:
            return
        self._sink.end_update()
        if self._checked is not None:
            _compare(self._checksums, self._checked)


def _refuse_infinite(bucket: WeightBucket) -> None:
    # Of the whole bucket first: two passes over many small tensors would take longer than sending them.
    if all(_is_finite(part) for part in bucket.parts()):
        return
    name = next(name for name, tensor in bucket if not _is_finite(tensor))
    raise WeightSyncError(
        f"weight '{name}' holds values that are not finite",
        expected="finite weights",
        remedy="lower optimizer.lr or resume from an earlier checkpoint",
    )


def _is_finite(tensor: Tensor) -> bool:
    """Smallest and largest are finite; unlike `isfinite` this needs no memory."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _cast(bucket: WeightBucket, dtypes: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the engine holds them."""
    for name, tensor in bucket:
        yield name, tensor.to(getattr(torch, dtypes[name])) if name in dtypes else tensor


def _compare(sent: Mapping[str, int], sink: CheckedSink) -> None:
    held = sink.checksums()
    wrong = sorted(name for name, value in sent.items() if held.get(name) != value)
    if not wrong:
        return
    sink.distrust(f"{len(wrong)} tensors are not what was sent, first '{wrong[0]}'")
    raise WeightSyncError(
        f"weight update: the engine does not hold what was sent: {_listed(wrong)}",
        seen=f"{len(wrong)} of {len(sent)} checksums differ",
        expected="equal checksums on both sides",
        remedy="the engine serves nothing until a whole update has been taken; look for faulty memory or links",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
