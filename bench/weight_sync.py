"""Weight updates from four expert-parallel ranks to an engine in a process of its own, three ways in one run.

    per parameter       every tensor is broadcast to all ranks, then announced and sent on its own
    AllGather, serial   every rank receives every bucket, which is sent before the next one is gathered (the usual way)
    ours                every part goes to the sender alone; the next bucket is gathered while one is sent

Ranks meet over gloo, the engine behind a socket that acknowledges every message. Two models: many small experts (2,304
matrices of 48 KiB) and few large ones (24 of 8 MiB). Then ours with a delay put into both stages, and its memory.
Run: python bench/weight_sync.py [--json FILE]
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ranks import on_ranks
from _report import Result, command_line, json_argument, report
from _samples import describe_qwen3_moe
from torch import Tensor

from moerl.contract.parallel import ParallelDims
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.models.description import ModelDescription
from moerl.weights.allgather import AllGather
from moerl.weights.bucket import WeightBucket
from moerl.weights.gather import SenderGather, TakeSlot
from moerl.weights.manifest import model_manifest
from moerl.weights.peers import Peers
from moerl.weights.plan import PlanOptions, SyncPlan, make_plan
from moerl.weights.publish import Publisher, PublishReport

RANKS = 4
REPEATS = 5
STEP_SECONDS = 60.0
CPU = torch.device("cpu")
MIB = 1 << 20
_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "vocab_size": 1024,
}
_LARGE = {"hidden_size": 2048, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 2048}
MANY_SMALL, FEW_LARGE = describe_qwen3_moe(**_SMALL), describe_qwen3_moe(**_SMALL | _LARGE)
MODELS = {"many small": (MANY_SMALL, 8 * MIB), "few large": (FEW_LARGE, 36 * MIB)}
DELAYS = {"both stages alike": (0.06, 0.06), "gathering slower": (0.08, 0.04), "sending slower": (0.04, 0.08)}


# --- the engine ------------------------------------------------------------------------------------------------------


def engine(address: tuple[str, int]) -> None:
    """Receives messages (length, bytes) into memory of its own and acknowledges each, until the other side is gone."""
    room = bytearray(64 * MIB)
    with socket.create_connection(address) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while length := int.from_bytes(read(link, memoryview(room)[:8]), "little"):
            read(link, memoryview(room)[:length])
            link.sendall(b"\1")


def read(link: socket.socket, into: memoryview) -> memoryview:
    """Fills `into`; with zeros if the other side is gone."""
    done = 0
    while done < len(into):
        count = link.recv_into(into[done:])
        if count == 0:
            into[:] = bytes(len(into))
            break
        done += count
    return into


class EngineSink:
    """A `WeightSink` in front of the engine. delay_seconds: put into every bucket."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=engine, args=(listener.getsockname(),))
        self._process.start()
        self._link, _ = listener.accept()
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()
        self.delay_seconds = 0.0

    def begin_update(self, update: WeightUpdate) -> None:
        """Nothing to do: the engine keeps no versions."""

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        assert isinstance(tensors, WeightBucket)
        time.sleep(self.delay_seconds)
        self.send(tensors.flat)

    def abandon_update(self) -> None:
        """Nothing to do: the engine keeps no versions."""

    def end_update(self) -> None:
        """Nothing to do: every message was acknowledged."""

    def send(self, data: Tensor) -> None:
        view = memoryview(data.numpy())
        self._link.sendall(len(view).to_bytes(8, "little"))
        self._link.sendall(view)
        assert self._link.recv(1) == b"\1"

    def close(self) -> None:
        self._link.close()
        self._process.join()


# --- three ways ------------------------------------------------------------------------------------------------------


class Update:
    """A model's shards on this rank, and the ways to bring them to the engine."""

    def __init__(self, rank: int, sizes: ModelDescription, bucket_bytes: int, sink: EngineSink | None) -> None:
        self.rank, self.sink = rank, sink
        dims = ParallelDims(expert=RANKS, data=RANKS)
        options = PlanOptions((0,), 2, bucket_bytes)
        self.plan = make_plan(model_manifest(sizes, dims), options)
        self.all_plan = make_plan(model_manifest(sizes, dims), replace(options, gather="allgather"))
        self.peers = Peers(rank, CPU, STEP_SECONDS)
        self.all_gather = AllGather(self.all_plan, self.peers)
        self.sender_gather = SenderGather(self.plan, self.peers)
        self.shards = random_shards(self.plan, rank)
        self.room = torch.empty(self.plan.largest_bucket_bytes, dtype=torch.uint8)
        self.messages = per_parameter_messages(self.all_plan)
        self.last: PublishReport | None = None

    def per_parameter(self) -> None:
        for source, pieces, num_bytes in self.messages:
            data = self.room[:num_bytes]
            if source == self.rank:
                offset = 0
                for piece in pieces:
                    rows = self.shards[piece.source][piece.source_row : piece.source_row + piece.num_rows]
                    data[offset : offset + piece.num_bytes] = rows.reshape(-1).view(torch.uint8)
                    offset += piece.num_bytes
            dist.broadcast(data, source)
            if self.sink is not None:
                self.sink.send(data)

    def all_gather_serial(self) -> None:
        for bucket in self.all_gather.gather(self.shards, lambda num_bytes: self.room[:num_bytes]):
            if bucket is not None and self.sink is not None:
                self.sink.receive(bucket)

    def ours(self, gather: Any = None) -> None:
        publisher = Publisher(self.plan, gather or self.sender_gather, self.peers, self.sink)
        self.last = publisher.publish(self.shards, WeightUpdate(0, UpdateKind.FULL, self.plan.tensors()))


def random_shards(plan: SyncPlan, rank: int) -> dict[str, Tensor]:
    """Returns random shards for a rank, in bfloat16."""
    torch.manual_seed(rank)
    return {name: torch.randn(shape).bfloat16() for name, shape in plan.manifest.shard_shapes(rank).items()}


def per_parameter_messages(plan: SyncPlan) -> list[tuple[int, list[Any], int]]:
    """(holder, pieces, bytes) of every tensor; without tensor parallelism each has one holder."""
    found = []
    for bucket in plan.buckets:
        for message in bucket.messages:
            by_name: dict[str, list[Any]] = {}
            for piece in message.pieces:
                by_name.setdefault(piece.target, []).append(piece)
            found += [(message.source, pieces, sum(p.num_bytes for p in pieces)) for pieces in by_name.values()]
    return found


class SlowGather(SenderGather):
    """Takes longer over every bucket."""

    delay_seconds = 0.0

    def gather(self, shards: Mapping[str, Tensor], take_slot: TakeSlot) -> Iterator[WeightBucket | None]:
        for bucket in super().gather(shards, take_slot):
            time.sleep(self.delay_seconds)
            yield bucket


# --- what a rank measures --------------------------------------------------------------------------------------------


def measure(layout: Any) -> dict[str, Any]:
    """Seconds by model and way, the pipeline's shares, bytes, and this rank's extra memory in buckets."""
    sink = EngineSink() if layout.rank == 0 else None
    found: dict[str, Any] = {"seconds": {}, "bytes": {}, "pipeline": {}, "memory": {}}
    for name, (sizes, bucket_bytes) in MODELS.items():
        update = Update(layout.rank, sizes, bucket_bytes, sink)
        found["memory"][name] = extra_memory(update) / bucket_bytes
        ways = {
            "per parameter": update.per_parameter,
            "AllGather, serial": update.all_gather_serial,
            "ours": update.ours,
        }
        found["seconds"][name] = {way: [] for way in ways}
        for repeat in range(REPEATS + 1):
            for way, function in ways.items():
                seconds = timed_together(function)
                if repeat:
                    found["seconds"][name][way].append(seconds)
        found["bytes"][name] = (update.sender_gather.received_bytes, needed_bytes(update.plan, layout.rank))
        all_gathered = (update.all_gather.received_bytes, needed_bytes(update.all_plan, layout.rank))
        found["bytes"][f"{name}, AllGather"] = all_gathered
        if name == "many small":
            found["pipeline"] = pipeline_shares(update)
    if sink is not None:
        sink.close()
    return found


def needed_bytes(plan: SyncPlan, rank: int) -> int:
    """Returns the bytes of a rank's buckets that are not in its shards."""
    return sum(bucket.received_bytes for bucket in plan.buckets if bucket.sender == rank)


def timed_together(function: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - start


def pipeline_shares(update: Update) -> dict[str, float]:
    """Wall time over that of the slowest stage, by delays."""
    shares = {}
    for name, (gather_seconds, send_seconds) in DELAYS.items():
        gather = SlowGather(update.plan, update.peers)
        gather.delay_seconds = gather_seconds if update.sink is not None else 0.0
        if update.sink is not None:
            update.sink.delay_seconds = send_seconds
        update.ours(gather)
        assert update.last is not None
        shares[name] = update.last.seconds / max(update.last.gather_seconds, update.last.send_seconds, 1e-9)
    if update.sink is not None:
        update.sink.delay_seconds = 0.0
    return shares


def extra_memory(update: Update) -> float:
    """Bytes by which this rank's resident memory grows during an update of ours, at its peak."""
    # Connections and the like are made once; what the first update has freed goes back, or it would be used unseen.
    update.ours()
    update.sender_gather = SenderGather(update.plan, update.peers)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    update.ours()
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return max(0, peak - before)


def results_of(ranks: list[dict[str, Any]]) -> list[Result]:
    results = [command_line()]
    for name, by_way in ranks[0]["seconds"].items():
        median = {way: statistics.median(seconds) for way, seconds in by_way.items()}
        for way, seconds in by_way.items():
            spread = max(seconds) - min(seconds)
            results.append(Result(f"{name}: {way}", median[way], unit="s", spread=spread))
        times = median["per parameter"] / median["ours"]
        results.append(Result(f"{name}: per parameter / ours", times, ">= 3", times >= 3, "times"))
        results.append(
            Result(f"{name}: AllGather, serial / ours", median["AllGather, serial"] / median["ours"], unit="times")
        )
        for way, goal in (("", "<= 1.05"), (", AllGather", "")):
            received, needed = (sum(rank["bytes"][name + way][i] for rank in ranks) for i in (0, 1))
            ratio = received / needed
            what = f"{name}{way or ', ours'}: bytes received / needed"
            results.append(Result(what, ratio, goal, not goal or ratio <= 1.05))
        memory = max(rank["memory"][name] for rank in ranks)
        results.append(Result(f"{name}: peak extra memory", memory, "<= 2", memory <= 2, "buckets"))
    for name, share in ranks[0]["pipeline"].items():
        results.append(Result(f"delays, {name}: wall / slowest stage", share, "<= 1.15", share <= 1.15))
    return results


if __name__ == "__main__":
    json_path = json_argument(__doc__)
    report(results_of(on_ranks(ParallelDims(expert=RANKS, data=RANKS), measure)), json_path)
