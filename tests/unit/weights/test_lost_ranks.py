"""Ranks that die or hang in the midst of an update, sinks that do not come back: an error with names, and soon.

Steps may take two seconds here; the process groups wait for minutes, so that no test passes by their limit.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_sync
from ranks import RANK_ENV, Ranks
from torch import Tensor

from moerl.contract.parallel import ParallelDims
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import WeightSyncError
from moerl.models.description import ModelDescription, describe
from moerl.weights.gather import SenderGather
from moerl.weights.manifest import model_manifest
from moerl.weights.plan import PlanOptions, SyncPlan, choose_senders, make_plan

STEP_SECONDS = 2.0


def tiny_sizes() -> ModelDescription:
    from families import FAMILIES

    return describe(FAMILIES["qwen3_moe"].config(num_hidden_layers=2).to_dict(), "tiny")


def make(dims: ParallelDims, gather: Any = "sender", senders: int = 1) -> SyncPlan:
    return make_plan(
        model_manifest(tiny_sizes(), dims), PlanOptions(choose_senders(dims, senders), 4, 1 << 13, gather=gather)
    )


def shards_of(plan: SyncPlan, rank: int) -> dict[str, Tensor]:
    return {name: torch.ones(shape) for name, shape in plan.manifest.shard_shapes(rank).items()}


class Versioned(weight_sync.KeepingSink):
    """Stands in for an engine: serves a version once an update to it has ended."""

    served = -1

    def begin_update(self, update: WeightUpdate) -> None:
        super().begin_update(update)
        self.version = update.version

    def end_update(self) -> None:
        super().end_update()
        self.served = self.version


def attempt(publisher: Any, shards: Mapping[str, Tensor], version: int) -> str:
    """Publishes a version; returns the error of this rank, empty if the update succeeds."""
    try:
        publisher.publish(shards, weight_sync.update_of(publisher._plan, version))
    except WeightSyncError as error:
        return str(error)
    return ""


# --- ranks -----------------------------------------------------------------------------------------------------------


class FaultyRanks:
    """Fault injection: ranks of which one ends or stops itself, which `Ranks` takes for a failure."""

    def __init__(self, folder: Path, dims: ParallelDims, fault: str, gather: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self.queue = context.Queue()
        arguments = (str(folder), make(dims, gather), fault, gather, self.queue)
        self.processes = [context.Process(target=faulty_rank, args=(rank, *arguments)) for rank in range(4)]

    def told(self) -> dict[int, tuple[str, str, int]]:
        """Runs the ranks. Returns, by surviving rank, the errors of the failed update and of another one, and the
        version then served."""
        try:
            for process in self.processes:
                process.start()
            return dict(self.queue.get(timeout=400) for _ in range(3))
        finally:
            for process in self.processes:
                process.kill()
                process.join()


FATAL = {"sender": 3, "allgather": 20}
"""The transfer or bucket in which it happens: the first buckets are dense, and every rank holds them."""
LOST = 1
"""The rank that dies or stops; in no layout here it is a sender."""


def faulty_rank(rank: int, folder: str, plan: SyncPlan, fault: str, gather: str, queue: Any) -> None:
    import torch.distributed as dist

    from moerl.weights.allgather import AllGather

    os.environ.update(RANK_ENV)
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=4, timeout=timedelta(minutes=10))
    kind: Any = SenderGather if gather == "sender" else AllGather

    class Fails(kind):
        """Fault injection: this rank comes to its end while it sends."""

        faulty, transfers = False, 0

        def _start(self, *args: Any) -> None:
            super()._start(*args)
            self._come_to_an_end()

        def _assemble(self, *args: Any) -> None:
            self._come_to_an_end()
            super()._assemble(*args)

        def _come_to_an_end(self) -> None:
            self.transfers += int(self.faulty)
            if rank == LOST and self.transfers == FATAL[gather]:
                os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[fault])

    sink = Versioned() if rank == 0 else None
    publisher = weight_sync.publisher_of(plan, rank, sink, Fails)
    shards = shards_of(plan, rank)
    publisher.publish(shards, weight_sync.update_of(plan, 0))
    Fails.faulty = True
    # Who dies is noticed at once, whatever a step may take.
    seconds = 60.0 if fault == "dies" else STEP_SECONDS
    publisher._peers.step_seconds = seconds
    messages = attempt(publisher, shards, 1), attempt(publisher, shards, 2)
    queue.put((rank, (*messages, -1 if sink is None else sink.served)))
    # The error ends a run: its process does not linger, but its connections stay until the others have given up, too.
    time.sleep(60)


@pytest.mark.parametrize(
    ("fault", "gather"),
    [
        ("dies", "sender"),
        pytest.param("stops", "sender", marks=pytest.mark.distributed),
        pytest.param("dies", "allgather", marks=pytest.mark.distributed),
    ],
)
def test_a_rank_lost_in_mid_gather_is_named_by_all_others_and_nothing_is_taken_into_use(
    fault: str, gather: str, tmp_path: Path
):
    told = FaultyRanks(tmp_path, ParallelDims(expert=4, data=4), fault, gather).told()
    assert told.keys() == {0, 2, 3}
    for rank, (message, again, served) in told.items():
        if gather == "sender":
            what = rf"bucket \d+ of rank 0 \(stage 0, expert, \d+ tensors\): rank 0 receives from rank {LOST}\b"
        else:
            what = rf"bucket \d+ of rank 0 .* all-gathers with ranks .* no word from ranks \[{LOST}\b"
        assert re.search(what, message), message
        assert ("nothing for 2 s" if fault == "stops" else "onnection") in message
        assert "have lost one another in an earlier one" in again
        assert served == (0 if rank == 0 else -1)


# --- sinks -----------------------------------------------------------------------------------------------------------


class Hangs(Versioned):
    """Fault injection: an engine that does not come back from one call until it is let go."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.hangs_at = at
        self.release = threading.Event()
        self.threads: set[int] = set()

    def _pass(self, name: str) -> None:
        self.threads.add(threading.get_ident())
        if name == self.hangs_at:
            assert self.release.wait(60)

    def begin_update(self, update: WeightUpdate) -> None:
        self._pass("begin_update")
        super().begin_update(update)

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._pass("bucket")
        super().receive(tensors)

    def end_update(self) -> None:
        self._pass("end_update")
        super().end_update()


def hang(layout: Any, at: str) -> list[Any]:
    rank, plan = layout.rank, make(ParallelDims(pipeline=2))
    shards = shards_of(plan, rank)
    sink = Hangs("") if rank == 0 else None
    publisher = weight_sync.publisher_of(plan, rank, sink)
    publisher.publish(shards, weight_sync.update_of(plan, 0))
    if sink is not None:
        sink.hangs_at = at
        publisher._thread.step_seconds = STEP_SECONDS
    told = [attempt(publisher, shards, 1)]
    served = -1
    if sink is not None:
        served = sink.served
        told.append("")
        sink.hangs_at = ""
    # Still busy: another update cannot begin, and says so.
    told.append(attempt(publisher, shards, 2))
    if sink is not None:
        publisher._thread.step_seconds = 60.0
        sink.release.set()
    publisher.publish(shards, weight_sync.update_of(plan, 3))
    if sink is not None:
        assert sink.served == 3
        assert len(sink.threads) == 1
        assert sink.calls[-1] == "end"
    return [*told, served]


@pytest.mark.parametrize(
    ("at", "doing", "step"),
    [
        pytest.param("begin_update", r"begin_update\(1\)", "begin", marks=pytest.mark.slow),
        ("bucket", r"bucket 0 of rank 0 \(stage 0, dense, \d+ tensors\)", r"bucket \d+ of senders"),
        pytest.param("end_update", "end_update", "end", marks=pytest.mark.slow),
    ],
)
def test_a_sink_that_hangs_is_named_on_every_rank_and_the_next_update_begins_once_it_is_back(
    at: str, doing: str, step: str, two_processes: Ranks
):
    (ours, _, busy, served), (theirs, theirs_busy, _) = two_processes.run(hang, at)
    assert re.search(f"the sink of rank 0 has not come back from {doing}; seen: 2 s without an answer", ours)
    assert re.search(f"{step} failed on other ranks; seen: ranks \\[0\\]; rank 0: .* {doing}", theirs)
    assert re.search(f"from begin_update\\(2\\).* busy with {doing}", busy)
    assert "begin failed on other ranks" in theirs_busy
    assert served == 0


def die_between_buckets(layout: Any) -> tuple[str, int, int]:
    rank, plan = layout.rank, make(ParallelDims(pipeline=2))
    shards = shards_of(plan, rank)

    class Dies(Versioned):
        """Fault injection: an engine whose connection breaks after two buckets of one update."""

        def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
            super().receive(tensors)
            if self.version == 1 and self.calls.count("bucket") - buckets_before == 2:
                raise ConnectionResetError("connection reset by peer")

    sink = Dies() if rank == 0 else None
    publisher = weight_sync.publisher_of(plan, rank, sink, step_seconds=60.0)
    buckets_before = 0
    publisher.publish(shards, weight_sync.update_of(plan, 0))
    if sink is not None:
        buckets_before = sink.calls.count("bucket")
    message = attempt(publisher, shards, 1)
    num_taken = -1
    if sink is not None:
        assert sink.served == 0
        num_taken = sink.calls.count("bucket") - buckets_before
    publisher.publish(shards, weight_sync.update_of(plan, 2))
    return message, num_taken, -1 if sink is None else sink.served


def test_an_engine_that_dies_between_two_buckets_is_named_and_the_next_update_works(two_processes: Ranks):
    (ours, num_taken, served), (theirs, _, _) = two_processes.run(die_between_buckets)
    for message in (ours, theirs):
        assert re.search("the sink of rank 0 failed in bucket 1 of rank 0 .*connection reset by peer", message)
    assert num_taken == 2
    assert served == 2


def slow(layout: Any, seconds: float) -> int:
    """Every step takes half of its time, on both sides; together they take more than what a rank waits for another."""
    rank, plan = layout.rank, make(ParallelDims(expert=2, data=2))
    shards = shards_of(plan, rank)

    class SlowGather(SenderGather):
        def gather(self, shards: Mapping[str, Tensor], take_slot: Any) -> Iterator[Any]:
            for number, bucket in enumerate(super().gather(shards, take_slot)):
                time.sleep(0.5 * seconds if number < 4 and rank == 1 else 0.0)
                yield bucket

    class Slow(Versioned):
        def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
            super().receive(tensors)
            time.sleep(0.5 * seconds if self.calls.count("bucket") < 4 else 0.0)

    sink = Slow() if rank == 0 else None
    publisher = weight_sync.publisher_of(plan, rank, sink, SlowGather, seconds)
    # Processes start at different times; that is no step of an update.
    torch.distributed.barrier()
    publisher.publish(shards, weight_sync.update_of(plan, 5))
    return -1 if sink is None else sink.served


@pytest.mark.slow
def test_steps_that_are_slow_but_within_their_time_add_up_to_no_error(two_processes: Ranks):
    assert two_processes.run(slow, 5.0) == [5, -1]
