"""The trainer ranks that send weights to an engine's servers, as the engine's process sees them.

    the engine's process    opens and ends updates of servers, and tells the senders what to do: `Senders`
    every sender            keeps its part of each set and sends it over process groups of its own: `ShardSender`

With S servers one sender would send every byte S times over its own link. A server takes one bucket at a time, whoever
it comes from: R senders keep min(R, S) links busy.

Commands and replies are short JSON messages over one TCP connection for each sender. Both sides prove that they know a
key that the engine's process made. The connection ends with either side.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Literal

import msgspec

from moerl.errors import WeightSyncError
from moerl.processes import admission
from moerl.processes.admission import Admission
from moerl.rollout.fleet.endpoint import require_private
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.fleet.receivers import Target

_RANK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Command:
    """begin: buckets of `version` go to these servers, and to no others. take: say which tensors of `version` have
    come. hold: from now on they are what late servers get. send: send what you hold to these servers, whose updates are
    open.

    number: of this command; its reply repeats it. dtypes: as `CheckedSink.held_dtypes`; with the first begin after they
    are known.
    """

    do: Literal["begin", "take", "hold", "send"]
    number: int = 0
    version: int = -1
    targets: tuple[Target, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """problem: why nothing was done. failed: servers that are out of the update, by key, and why. checksums: of the
    tensors that have come, by name; None where the trainer computed none."""

    number: int
    problem: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Introduction:
    """Where the engine's process listens for senders, and the key that both sides prove to know. bucket_bytes,
    keeps_copy: as in `EngineOptions`. together: as in `Receivers`."""

    host: str
    port: int
    key: bytes
    bucket_bytes: int
    keeps_copy: bool
    together: bool

    def __repr__(self) -> str:
        return f"Introduction(host={self.host!r}, port={self.port})"


class Senders:
    """The senders of one engine; one command at a time.

    Args:
        ranks: of all senders.
        seconds: that a sender has to connect, for every bucket, and for every other command.
        options: of the engine.
        host: that they reach this process at: loopback or private.
    """

    def __init__(self, ranks: Sequence[int], seconds: float, options: EngineOptions, host: str = "127.0.0.1") -> None:
        require_private(host)
        self._ranks, self._seconds = tuple(ranks), seconds
        self._connections: dict[int, Connection] = {}
        self._num_asked = 0
        self._is_complete, self._is_closed = threading.Event(), False
        self._lock = threading.Lock()  # of the connections while they come
        self._admission = Admission(host, self._keep, _RANK_BYTES)
        port, key, is_alone = self._admission.port, self._admission.key, len(self._ranks) == 1
        self.introduction = Introduction(host, port, key, options.bucket_bytes, options.keeps_copy, is_alone)

    async def ask(self, command: Command) -> list[Reply]:
        """Has all senders do something; their replies in the order of ranks.

        Raises:
            WeightSyncError: a sender is gone, takes too long, or could not do it.
        """
        return await asyncio.to_thread(self._ask, command)

    def _ask(self, command: Command) -> list[Reply]:
        if not self._is_complete.wait(self._seconds):
            missing = [rank for rank in self._ranks if rank not in self._connections]
            raise self._failed(missing[0], command, f"no connection within {self._seconds:g} s")
        self._num_asked += 1
        command = replace(command, number=self._num_asked)
        message = msgspec.json.encode(command)
        for rank in self._ranks:
            try:
                self._connections[rank].send_bytes(message)
            except OSError as error:
                raise self._failed(rank, command, error) from error
        replies = [self._reply(rank, command) for rank in self._ranks]
        for rank, reply in zip(self._ranks, replies, strict=True):
            if reply.problem:
                raise self._failed(rank, command, reply.problem)
        return replies

    async def close(self) -> None:
        """Leaves the senders, which leave the servers."""
        self._is_closed = True
        self._admission.close()
        with self._lock:
            for connection in self._connections.values():
                connection.close()

    def _keep(self, connection: Connection, words: bytes) -> None:
        """Takes the connection of a sender that is missing. Raises OSError where this rank is not waited for."""
        rank = int.from_bytes(words)
        with self._lock:
            if self._is_closed or rank not in self._ranks or rank in self._connections:
                raise ConnectionRefusedError(f"rank {rank} is no sender, or has connected before")
            self._connections[rank] = connection
            if len(self._connections) < len(self._ranks):
                return
        self._is_complete.set()
        self._admission.close()

    def _reply(self, rank: int, command: Command) -> Reply:
        connection = self._connections[rank]
        try:
            while connection.poll(self._seconds):
                message = connection.recv_bytes()
                reply = msgspec.json.decode(message, type=Reply) if message else None
                if reply is not None and reply.number == command.number:  # else of a command that was given up
                    return reply
        except (OSError, EOFError) as error:
            raise self._failed(rank, command, error or "it has closed its connection") from error
        raise self._failed(rank, command, f"nothing for {self._seconds:g} s")

    def _failed(self, rank: int, command: Command, seen: object) -> WeightSyncError:
        return WeightSyncError(
            f"weight update: rank {rank}, a sender, failed in {command.do!r}",
            seen=seen,
            expected="its part of the weights for every server",
            remedy="see its output; resume from the last checkpoint where it is gone",
        )


def connect(introduction: Introduction, rank: int, seconds: float) -> Connection:
    """A sender's connection to the engine's process.

    Raises:
        WeightSyncError: it does not listen there, or one side does not know the key.
    """
    try:
        return admission.connect(
            introduction.host,
            introduction.port,
            introduction.key,
            seconds=seconds,
            words=rank.to_bytes(_RANK_BYTES),
        )
    except (AuthenticationError, OSError, EOFError) as error:
        raise WeightSyncError(
            f"weight update: rank {rank} cannot reach the engine's process",
            seen=f"{introduction!r}: {type(error).__name__}: {error}",
            expected="a connection, and the same key on both sides",
            remedy="see the output of the engine's process",
        ) from error
