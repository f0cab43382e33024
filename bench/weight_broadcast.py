"""Weights from one sender to 1, 2, 4 and 8 receivers, with links of a fixed speed.

    passed on    one group of all: every receiver passes pieces on to the next one while it receives (as we send)
    each alone   a group for each receiver: the sender sends every byte to every one of them

Receivers are processes of their own that run the relay of `patches/sglang`, over gloo. The sender and every receiver
have one link out and one in, each of a speed that is kept by waiting, so that two cores carry eighteen links. Buckets
and pieces are an eighth of the real ones.
Run: python bench/weight_broadcast.py [--json FILE]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from _report import Result, command_line, json_argument, report
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    _new_process_group_helper,  # pyright: ignore[reportPrivateUsage]
)

from moerl.machine.interfaces import LOOPBACK
from moerl.processes.loop_thread import in_thread
from moerl.rollout.sglang import broadcast, sender_group
from moerl.rollout.sglang.broadcast import Broadcast
from moerl.rollout.sglang.invitation import Invitation
from moerl.rollout.sglang.patches import read_patches
from moerl.rollout.sglang.sender_group import GroupOptions, SenderGroup
from moerl.rollout.sglang.unified_diff import apply_patch

MIB = 1 << 20
NUM_RECEIVERS = (1, 2, 4, 8)
BUCKET_BYTES = 32 * MIB
PIECE_BYTES = sender_group.PIECE_BYTES // 8
BYTES_PER_SECOND = 16 * MIB
REPEATS = 3
STEP_SECONDS = 120.0
RELAY = "sglang/srt/weight_sync/relay.py"


class Link:
    """Outgoing link of one process: sends pieces one after the other, each for as long as the link's speed takes."""

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()
        self.num_bytes = 0
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, num_bytes: int, deliver: Callable[[], None]) -> None:
        self._pieces.put((num_bytes, deliver))

    def _run(self) -> None:
        free = 0.0
        while True:
            num_bytes, deliver = self._pieces.get()
            free = max(free, time.perf_counter()) + num_bytes / BYTES_PER_SECOND
            time.sleep(max(0.0, free - time.perf_counter()))
            deliver()
            self.num_bytes += num_bytes


class SentPiece:
    """A piece that waits for the link, then travels."""

    def __init__(self, link: Link, group: Any, arguments: tuple[Any, ...]) -> None:
        self._work: Any = None
        self._is_under_way = threading.Event()
        self._group, self._arguments = group, arguments
        link.put(arguments[0][0].numel(), self._go)

    def _go(self) -> None:
        self._work = self._group.send(*self._arguments)
        self._is_under_way.set()

    def wait(self, timeout: timedelta) -> None:
        if not self._is_under_way.wait(timeout.total_seconds()):
            raise RuntimeError("the link is busy")
        self._work.wait(timeout)


class ReceivedPiece:
    """A piece that counts as received when the link in has had the time for it."""

    def __init__(self, group: PacedGroup, work: Any, num_bytes: int) -> None:
        self._group, self._work, self._num_bytes = group, work, num_bytes

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
        group = self._group
        group.received = max(time.perf_counter(), group.received + self._num_bytes / BYTES_PER_SECOND)
        time.sleep(max(0.0, group.received - time.perf_counter()))


class PacedGroup:
    """A process group behind links."""

    def __init__(self, group: Any, link: Link) -> None:
        self.group, self._link, self.received = group, link, 0.0

    def send(self, *arguments: Any) -> SentPiece:
        return SentPiece(self._link, self.group, arguments)

    def recv(self, *arguments: Any) -> ReceivedPiece:
        return ReceivedPiece(self, self.group.recv(*arguments), arguments[0][0].numel())


class PacedSender(SenderGroup):
    """The sender's end, behind its one link."""

    link: Link

    def form(self) -> None:
        super().form()
        self._group = PacedGroup(self._group, self.link)

    def leave(self) -> None:
        if self._group is not None:
            self._group = self._group.group
        super().leave()


class Receiver:
    """A `Receiver` in a process of its own."""

    num_ranks = 1

    def __init__(self, name: str) -> None:
        self.key = self.name = name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=receive, args=(theirs,), daemon=True)
        self.process.start()

    async def join(self, invitation: Invitation) -> None:
        await in_thread(lambda: self._ask(invitation))

    async def take(self, bucket: Sequence[tuple[str, Tensor]], number: int) -> None:
        await in_thread(lambda: self._ask(sum(tensor.nbytes for _, tensor in bucket)))

    def _ask(self, what: object) -> None:
        self._connection.send(what)
        assert self._connection.recv() in (None, BUCKET[0][1][0])


def receive(connection: Connection) -> None:
    """Joins groups and takes buckets; answers with what all bytes of a bucket are."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module, link, relay = load_relay(), Link(), None
    while True:
        match connection.recv():
            case Invitation() as told:
                seconds, rank = told.relay_seconds, told.rank_offset
                store = module.join_store(
                    told.master_address, told.master_port, told.world_size, rank, told.group_name, seconds
                )
                group, _ = _new_process_group_helper(
                    told.world_size,
                    rank,
                    [],
                    Backend(told.backend),
                    store,
                    group_name=told.group_name,  # pyright: ignore[reportArgumentType]
                    timeout=timedelta(seconds=seconds),
                )
                route = module.route_of(rank, list(told.relay_first_ranks), told.world_size)
                relay = module.Relay(PacedGroup(group, link), route, told.relay_piece_bytes, seconds)
                connection.send(None)
            case int(num_bytes):
                assert relay is not None
                flat = torch.empty(num_bytes, dtype=torch.uint8)
                relay.receive(flat)
                assert flat.min() == flat.max()
                connection.send(int(flat[0]))
            case other:
                raise AssertionError(f"an unknown message: {other!r}")


def load_relay() -> ModuleType:
    """The module that the patches add to SGLang."""
    added = [(patch.name, file) for patch in read_patches().patches for file in patch.files if file.path == RELAY]
    [(name, file)] = added
    text = apply_patch(None, file, name)
    assert text is not None
    module = ModuleType("relay")
    exec(compile(text, RELAY, "exec"), module.__dict__)
    return module


BUCKET = [("w", torch.full((BUCKET_BYTES,), 7, dtype=torch.uint8))]


def passed_on(receivers: Sequence[Receiver]) -> Callable[[], Coroutine[Any, Any, None]]:
    sender = new_broadcast()

    async def update() -> None:
        assert await sender.send(BUCKET, {r.key: r for r in receivers}, 0) == {}

    return update


def each_alone(receivers: Sequence[Receiver]) -> Callable[[], Coroutine[Any, Any, None]]:
    senders = [new_broadcast() for _ in receivers]

    async def update() -> None:
        sends = (s.send(BUCKET, {r.key: r}, 0) for s, r in zip(senders, receivers, strict=True))
        assert await asyncio.gather(*sends) == [{}] * len(receivers)

    return update


def new_broadcast() -> Broadcast:
    return Broadcast(GroupOptions("127.0.0.1", "gloo", torch.device("cpu"), STEP_SECONDS))


def measure(receivers: Sequence[Receiver]) -> dict[tuple[str, int], tuple[float, float, int]]:
    """By way and number of receivers: seconds (median, spread) and bytes over the sender's link. Groups are there."""
    link = PacedSender.link
    found: dict[tuple[str, int], tuple[float, float, int]] = {}
    for way, make in (("passed on", passed_on), ("each alone", each_alone)):
        for count in NUM_RECEIVERS:
            update = make(receivers[:count])
            asyncio.run(update())
            seconds = []
            before = link.num_bytes
            for _ in range(REPEATS):
                start = time.perf_counter()
                asyncio.run(update())
                seconds.append(time.perf_counter() - start)
            num_bytes = (link.num_bytes - before) // REPEATS
            found[way, count] = statistics.median(seconds), max(seconds) - min(seconds), num_bytes
    return found


def main() -> list[Result]:
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    PacedSender.link = Link()
    broadcast.SenderGroup = PacedSender
    sender_group.PIECE_BYTES = PIECE_BYTES
    results = [command_line()]
    receivers = [Receiver(str(number)) for number in range(max(NUM_RECEIVERS))]
    found = measure(receivers)
    for receiver in receivers:
        receiver.process.kill()
    for (way, count), (seconds, spread, num_bytes) in found.items():
        results.append(Result(f"{way}, {count} receivers", seconds, unit="s", spread=spread))
        results.append(Result(f"{way}, {count} receivers: over the sender's link", num_bytes / MIB, unit="MiB"))
    most, least = max(NUM_RECEIVERS), min(NUM_RECEIVERS)
    for way, goal in (("passed on", "<= 1.3"), ("each alone", "")):
        times = found[way, most][0] / found[way, least][0]
        results.append(Result(f"{way}: {most} receivers / {least}", times, goal, not goal or times <= 1.3, "times"))
    times = found["each alone", most][0] / found["passed on", most][0]
    results.append(Result(f"{most} receivers: each alone / passed on", times, ">= 6", times >= 6, "times"))
    return results


if __name__ == "__main__":
    json_path = json_argument(__doc__)
    report(main(), json_path)
