"""A trainer rank that sends its part of every set of weights to the servers of an engine in another process.

It keeps its part for servers that come late, and does what `Senders` of the engine's process tells it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import WeightChannel
from moerl.rollout.fleet.receivers import Receivers, Target
from moerl.rollout.fleet.sender import Sender
from moerl.rollout.fleet.senders import Command, Introduction, connect
from moerl.rollout.fleet.weight_set import WeightSet

_BUSY = b""
"""Sent before a reply that takes long, before each bucket."""


class ShardSender:
    """A `CheckedSink` that sends its part of every set, and keeps it for late servers.

    Args:
        rank: of this sender.
        introduction: of the engine's process.
        shapes: as in `EngineOptions`.
        open_channel: of the servers' backend.
        seconds: that the engine's process has to take the connection, and to begin an update.

    Raises:
        WeightSyncError: as `connect`.
    """

    def __init__(
        self,
        rank: int,
        introduction: Introduction,
        shapes: Mapping[str, tuple[int, ...]],
        open_channel: Callable[[Target], WeightChannel],
        seconds: float,
    ) -> None:
        self._seconds = seconds
        self._knows_dtypes = threading.Event()
        self._connection = connect(introduction, rank, seconds)
        self._loop = asyncio.new_event_loop()
        weight_set = WeightSet(shapes, {}, keeps_copy=introduction.keeps_copy)
        receivers = Receivers(open_channel, together=introduction.together)
        self._sender = Sender(weight_set, receivers, introduction.bucket_bytes)
        for name, run in (("weight-channels", self._loop.run_forever), ("shard-sender", self._serve)):
            threading.Thread(target=run, name=name, daemon=True).start()

    # --- for the trainer ---------------------------------------------------------------------------------------------

    def begin_update(self, version: int) -> None:
        """Begins the part. To which servers it goes the engine's process says."""
        self._wait(self._sender.begin_set(version))

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends one bucket. Servers that fail are the engine's concern.

        Raises:
            WeightSyncError: as `Sender.receive`.
        """
        self._wait(self._sender.receive(tensors))

    def end_update(self) -> None:
        """Nothing: the engine's process ends the update of all senders together, after this."""

    def abandon_update(self) -> None:
        """Nothing: the engine's process abandons the update, and has the version before sent again."""

    def held_dtypes(self) -> Mapping[str, str]:
        """As servers hold tensors; the engine's process says so when it begins.

        Raises:
            WeightSyncError: it has not.
        """
        if not self._knows_dtypes.wait(self._seconds):
            raise WeightSyncError(
                "weight update: the engine's process has not begun it",
                seen=f"nothing for {self._seconds:g} s",
                expected="the dtypes of its servers",
                remedy="see its output",
            )
        assert self._sender.dtypes is not None
        return self._sender.dtypes

    def verify(self, sent: Mapping[str, int]) -> None:
        """Keeps the checksums for the engine's process, which compares them with those of all servers."""
        self._sender.checksums = sent

    # --- for the engine's process ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Until the engine is closed, or its process is gone."""
        with self._connection:
            while True:
                try:
                    command = msgspec.json.decode(self._connection.recv_bytes(), type=Command)
                    reply = self._wait(self._sender.do(command, lambda: self._connection.send_bytes(_BUSY)))
                    if self._sender.dtypes is not None:
                        self._knows_dtypes.set()
                    self._connection.send_bytes(msgspec.json.encode(reply))
                except (OSError, EOFError):
                    break
        self._wait(self._sender.close())

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the event loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
