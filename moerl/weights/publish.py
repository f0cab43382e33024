"""A trainer rank's part of a weight update: gather, hand over, one version at a time. Runs in every trainer rank.

The controller begins the engine's update before this part (from files after it) and ends it afterwards
(`moerl.ranks.updates`). While a
sender's sink receives one bucket (in a thread of its own), the next one is gathered into the other of two slots.
Between two buckets all ranks agree to go on: a sink that has failed or does not return ends the update on every rank,
and engines keep the version they had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moerl.contract.ports import WeightSink
from moerl.contract.weight_update import WeightUpdate
from moerl.weights.bucket import WeightBucket, find_shard_problem
from moerl.weights.bucket_sender import BucketSender, SinkThread
from moerl.weights.gather import TakeSlot
from moerl.weights.peers import Peers
from moerl.weights.plan import SyncPlan


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Report of one rank on one publication."""

    num_bytes: int
    """Bytes that this rank handed to its sink."""
    total_bytes: int
    """Bytes that all ranks handed to their sinks."""
    received_bytes: int
    """Bytes that this rank received in the update."""
    needed_bytes: int
    """Bytes of this rank's buckets that are not in its shards."""
    gather_seconds: float
    """Time of gathering, without waits for a free slot."""
    send_seconds: float
    """Time in which buckets were checked, received by the sink and summed up; 0 without a sink."""
    end_seconds: float
    """Time in which the sink ended the update; 0 without a sink."""
    seconds: float
    """Time of the whole publication."""
    checksums: Mapping[str, int | None]
    """Checksums of the tensors that this rank handed to its sink, as in `BucketSender`; empty without a sink."""

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a run's log, by the names of docs/metrics.md."""
        return {
            "weights/bytes": float(self.total_bytes),
            "weights/received_bytes": float(self.received_bytes),
            "weights/gather_seconds": self.gather_seconds,
            "weights/send_seconds": self.send_seconds,
            "weights/end_seconds": self.end_seconds,
        }


class Gatherer(Protocol):
    """A way of gathering, as `SenderGather`."""

    received_bytes: int
    """Bytes that this rank received in the update."""

    def gather(self, shards: Mapping[str, Tensor], take_slot: TakeSlot) -> Iterator[WeightBucket | None]: ...


class Publisher:
    """Publisher of versions by one plan.

    Args:
        gatherer: of the plan, on every rank the same kind.
        peers: all ranks.
        sink: of this rank, if it is a sender of the plan; else None.
        sink_name: for errors.
    """

    def __init__(
        self, plan: SyncPlan, gatherer: Gatherer, peers: Peers, sink: WeightSink | None, sink_name: str = "the sink"
    ) -> None:
        rank = peers.rank
        assert (rank in plan.options.senders) == (sink is not None), f"rank {rank}: a sink, but no sender, or no sink"
        self._plan, self._gatherer, self._peers, self._sink = plan, gatherer, peers, sink
        self._num_rounds = len(plan.rounds())
        self._own_buckets = [bucket for bucket in plan.buckets if bucket.sender == rank]
        self._thread = None if sink is None else SinkThread(f"{sink_name} of rank {rank}", peers.step_seconds)

    def publish(
        self, shards: Mapping[str, Tensor], update: WeightUpdate, dtypes: Mapping[str, str] | None = None
    ) -> PublishReport:
        """Hands the tensors of an update to the sinks. A collective of all trainer ranks.

        Args:
            shards: this rank's weights by the names of the plan; they must not change meanwhile.
            update: lists the tensors of the plan.
            dtypes: dtypes to which the engine rounds each tensor (`CheckedSink.held_dtypes`), for the checksums in the
                report; None if no checksums are wanted.

        Raises:
            WeightSyncError: on every rank, if a rank has other tensors than planned, a weight is not finite, a sink
                refused or did not return, or a rank is gone.
        """
        start = time.perf_counter()
        sender = None
        if self._sink is not None and self._thread is not None:
            slot_bytes = max((bucket.num_bytes for bucket in self._own_buckets), default=0)
            sender = BucketSender(self._sink, self._thread, self._peers.device, slot_bytes, dtypes)
        try:
            problem = find_shard_problem(self._plan, self._peers.rank, shards)
            if problem is None and sender is not None:
                problem = sender.begin(update)
            self._peers.agree(problem, "begin")
            gather_seconds = self._transfer(sender, shards)
            # On the first sender last: its sink may complete the version of all.
            is_first = self._peers.rank == self._plan.options.senders[0]
            for now in (False, True):
                mine = sender if is_first == now else None
                self._peers.agree(None if mine is None else mine.end(), "end")
        except BaseException:
            if sender is not None:
                sender.abandon()
            raise
        return PublishReport(
            num_bytes=0 if sender is None else sender.num_bytes,
            total_bytes=sum(bucket.num_bytes for bucket in self._plan.buckets),
            received_bytes=self._gatherer.received_bytes,
            needed_bytes=sum(bucket.received_bytes for bucket in self._own_buckets),
            gather_seconds=gather_seconds,
            send_seconds=0.0 if sender is None else sender.send_seconds,
            end_seconds=0.0 if sender is None else sender.end_seconds,
            seconds=time.perf_counter() - start,
            checksums={} if sender is None else sender.checksums,
        )

    def ask_sink[T](self, doing: str, run: Callable[[], T]) -> T:
        """Has the sink's thread run a function between two updates; returns its result. On a sender. Raises as
        `SinkThread.call`."""
        assert self._thread is not None
        return self._thread.call(doing, run)

    def _transfer(self, sender: BucketSender | None, shards: Mapping[str, Tensor]) -> float:
        """Gathers and sends all buckets, until the sinks have received them; returns the seconds of gathering."""

        def settle(at_most: int, step: str) -> None:
            self._peers.agree(None if sender is None else sender.settle(at_most), step)

        seconds = 0.0
        buckets = self._gatherer.gather(shards, _no_slot if sender is None else sender.slot)
        for number in range(self._num_rounds):
            if number:
                settle(1, f"bucket {number - 1} of senders")
            start = time.perf_counter()
            bucket = next(buckets)
            seconds += time.perf_counter() - start
            if bucket is not None and sender is not None:
                sender.send(bucket)
        # One at a time: no rank waits longer than one step of another rank.
        for left in (1, 0):
            settle(left, f"bucket {self._num_rounds - 1 - left} of senders")
        return seconds


def _no_slot(num_bytes: int) -> Tensor:
    raise AssertionError(f"room for {num_bytes} bytes on a rank that is no sender")
