"""Weight updates of two servers from one sender and from two, with links of a fixed speed.

    one sender     sends every byte twice over its own link
    two senders    send a half each, at once

Four expert-parallel ranks meet over gloo. A server is a process of its own behind sockets: it takes one bucket at a
time, whoever it comes from, at the speed of its link, as SGLang does; a sender sends one bucket at a time at that
of its own. Speeds are kept by waiting, so that two cores carry four links.
Run: python bench/weight_senders.py [--json FILE]
"""

# pyright: reportAttributeAccessIssue=false
# `weight_sync` is the file next to this one; pyright looks into tests/ first, which has a module of that name.

from __future__ import annotations

import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from _ranks import on_ranks
from _report import Result, command_line, json_argument, report
from weight_sync import CPU, MANY_SMALL, MIB, RANKS, STEP_SECONDS, random_shards, read, timed_together

from moerl.contract.parallel import ParallelDims
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.weights.bucket import WeightBucket
from moerl.weights.gather import SenderGather
from moerl.weights.manifest import model_manifest
from moerl.weights.peers import Peers
from moerl.weights.plan import PlanOptions, choose_senders, make_plan
from moerl.weights.publish import Publisher

SERVERS = 2
REPEATS = 5
BUCKET_BYTES = 8 * MIB
BYTES_PER_SECOND = 128 * MIB


def server(listener: socket.socket) -> None:
    """Takes messages (length, bytes) from any number of senders until the process is ended."""
    takes_one = threading.Lock()
    while True:
        link, _ = listener.accept()
        threading.Thread(target=take, args=(link, takes_one), daemon=True).start()


def take(link: socket.socket, takes_one: threading.Lock) -> None:
    room = bytearray(2 * BUCKET_BYTES)
    while length := int.from_bytes(read(link, memoryview(room)[:8]), "little"):
        with takes_one:
            start = time.perf_counter()
            read(link, memoryview(room)[:length])
            time.sleep(max(0.0, length / BYTES_PER_SECOND - (time.perf_counter() - start)))
        link.sendall(b"\1")


class ServersSink:
    """A `WeightSink` in front of all servers. num_bytes: sent over this sender's link."""

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self._links = [socket.create_connection(address) for address in addresses]
        self._own_link = threading.Lock()
        self._pool = ThreadPoolExecutor(len(addresses))
        self.num_bytes = 0

    def begin_update(self, update: WeightUpdate) -> None:
        self.num_bytes = 0

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        assert isinstance(tensors, WeightBucket)
        view = memoryview(tensors.flat.numpy())
        list(self._pool.map(lambda link: self._send(link, view), self._links))

    def abandon_update(self) -> None:
        """Nothing to do: servers keep no versions."""

    def end_update(self) -> None:
        """Nothing to do: every message was acknowledged."""

    def _send(self, link: socket.socket, view: memoryview) -> None:
        with self._own_link:
            link.sendall(len(view).to_bytes(8, "little"))
            link.sendall(view)
            assert link.recv(1) == b"\1"
            self.num_bytes += len(view)

    def close(self) -> None:
        for link in self._links:
            link.close()


def measure(layout: Any, addresses: list[tuple[str, int]]) -> dict[int, tuple[list[float], int]]:
    """Seconds of every repeat and bytes over this rank's link, by the number of senders."""
    dims = ParallelDims(expert=RANKS, data=RANKS)
    ways: dict[int, tuple[Publisher, ServersSink | None]] = {}
    shards, update = {}, WeightUpdate(0, UpdateKind.FULL, {})
    for senders in (1, 2):
        plan = make_plan(model_manifest(MANY_SMALL, dims), PlanOptions(choose_senders(dims, senders), 2, BUCKET_BYTES))
        shards = random_shards(plan, layout.rank)
        sink = ServersSink(addresses) if layout.rank in plan.options.senders else None
        update = WeightUpdate(0, UpdateKind.FULL, plan.tensors())
        peers = Peers(layout.rank, CPU, STEP_SECONDS)
        ways[senders] = Publisher(plan, SenderGather(plan, peers), peers, sink), sink
    seconds: dict[int, list[float]] = {senders: [] for senders in ways}
    for repeat in range(REPEATS + 1):
        for senders, (publisher, _) in ways.items():
            took = timed_together(lambda publisher=publisher: publisher.publish(shards, update) and None)
            if repeat:
                seconds[senders].append(took)
    dist.barrier()
    found = {senders: (seconds[senders], 0 if sink is None else sink.num_bytes) for senders, (_, sink) in ways.items()}
    for _, sink in ways.values():
        if sink is not None:
            sink.close()
    return found


def main() -> list[Result]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(SERVERS)]
    context = multiprocessing.get_context("spawn")
    servers = [context.Process(target=server, args=(listener,), daemon=True) for listener in listeners]
    for process in servers:
        process.start()
    addresses = [listener.getsockname() for listener in listeners]
    ranks = on_ranks(ParallelDims(expert=RANKS, data=RANKS), measure, addresses)
    for process in servers:
        process.terminate()
    results = [command_line()]
    median = {}
    for senders, name in ((1, "one sender"), (2, "two senders")):
        seconds = ranks[0][senders][0]
        median[senders] = statistics.median(seconds)
        results.append(Result(name, median[senders], unit="s", spread=max(seconds) - min(seconds)))
        most = max(rank[senders][1] for rank in ranks)
        results.append(Result(f"{name}: bytes over the busiest sender's link", most / MIB, unit="MiB"))
    times = median[1] / median[2]
    results.append(Result("one sender / two senders", times, ">= 1.7", times >= 1.7, "times"))
    return results


if __name__ == "__main__":
    json_path = json_argument(__doc__)
    report(main(), json_path)
