"""Several roots of the trainer that send one set of weights to the same servers, each a part of it, at once.

    the engine's process    opens and ends updates of servers, sends its own part, and directs the others: `OtherRoots`
    every other root        keeps its part of each set and sends it over process groups of its own: `PartSink`

With S servers the first root alone would send every byte S times over its own link. A server takes one bucket at a
time, whoever it comes from: R roots keep min(R, S) links busy.

Commands and replies are short messages over one connection for each other root: a Unix socket in a folder of the user's
own, so all are ranks of one machine, and a key that the engine's process made. The connection ends with either side.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Literal

import msgspec
import torch
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.targets import attempt_all, messages
from moerl.rollout.sglang.weight_set import WeightSet
from moerl.rollout.sglang.weights import LinkOptions, WeightLink

_BUSY = b""
"""Sent before a reply that takes long, after each bucket."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server. key: of the engine's connection to it; a server that took its place has another."""

    key: str
    name: str
    endpoint: Endpoint
    options: LinkOptions


@dataclass(frozen=True, slots=True)
class Command:
    """begin: buckets from now on go to these servers, and to no others. take: say which tensors have come. hold: from
    now on they are what late servers get. send: send what you hold to these servers, whose updates are open.

    number: of this command; its reply repeats it. version: that is held from now on, or is to be sent. dtypes: as
    `CheckedSink.held_dtypes`; with the first begin after they are known.
    """

    do: Literal["begin", "take", "hold", "send"]
    number: int = 0
    version: int = -1
    targets: tuple[Target, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """problem: why nothing was done. failed: servers that are out of the update, by key, and why. checksums: of the
    tensors that have come, by name; None where nobody has asked for any."""

    number: int
    problem: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Introduction:
    """Where the engine's process listens for other roots, and the key that it knows them by."""

    address: str
    key: bytes


class OtherRoots:
    """The other roots as the engine's process sees them; one call at a time.

    Args:
        ranks: of the other roots.
        seconds: that a root has to connect, for every bucket, and for anything else that it is asked.
    """

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        self._ranks, self._seconds = tuple(ranks), seconds
        self._connections: dict[int, Connection] = {}
        self._num_asked = 0
        self._is_complete, self._is_closed = threading.Event(), False
        key = secrets.token_bytes(32)
        self._listener = Listener(family="AF_UNIX", authkey=key)
        self.introduction = Introduction(str(self._listener.address), key)
        threading.Thread(target=self._accept, name="weight-roots", daemon=True).start()

    def ask(self, command: Command) -> list[Reply]:
        """Has all roots do something; their replies in the order of ranks.

        Raises:
            WeightSyncError: a root is gone, takes too long, or could not do it.
        """
        if not self._is_complete.wait(self._seconds):
            missing = [rank for rank in self._ranks if rank not in self._connections]
            raise self._gone(missing[0], command, f"no connection within {self._seconds:g} s")
        self._num_asked += 1
        command = replace(command, number=self._num_asked)
        message = msgspec.json.encode(command)
        for rank in self._ranks:
            try:
                self._connections[rank].send_bytes(message)
            except OSError as error:
                raise self._gone(rank, command, error) from error
        replies = [self._hear(rank, command) for rank in self._ranks]
        for rank, reply in zip(self._ranks, replies, strict=True):
            if reply.problem:
                raise self._gone(rank, command, reply.problem)
        return replies

    def close(self) -> None:
        """Leaves the other roots, which leave the servers."""
        self._is_closed = True
        self._listener.close()
        for connection in self._connections.values():
            connection.close()

    def _accept(self) -> None:
        while len(self._connections) < len(self._ranks):
            try:
                connection = self._listener.accept()
                self._connections[int.from_bytes(connection.recv_bytes())] = connection
            except (AuthenticationError, OSError, EOFError):  # a stranger, or closed meanwhile
                if self._is_closed:
                    return
        self._listener.close()
        self._is_complete.set()

    def _hear(self, rank: int, command: Command) -> Reply:
        connection = self._connections[rank]
        try:
            while connection.poll(self._seconds):
                message = connection.recv_bytes()
                reply = msgspec.json.decode(message, type=Reply) if message else None
                if reply is not None and reply.number == command.number:  # else of a command that was given up
                    return reply
        except (OSError, EOFError) as error:
            raise self._gone(rank, command, error or "it has closed its connection") from error
        raise self._gone(rank, command, f"nothing for {self._seconds:g} s")

    def _gone(self, rank: int, command: Command, seen: object) -> WeightSyncError:
        return WeightSyncError(
            f"weight update: rank {rank}, a root, failed in {command.do!r}",
            seen=seen,
            expected="its part of the weights for every server",
            remedy="see its output; resume from the last checkpoint where it is gone",
        )


class PartSink:
    """A `CheckedSink` that sends its part of every set to an engine in another process, and keeps it for late servers.

    Args:
        rank: of this root.
        introduction: of the engine's process.
        shapes: as in `EngineOptions`.
        device: of this rank; NCCL sends from it.
        seconds: that the engine has to begin an update.
    """

    def __init__(
        self,
        rank: int,
        introduction: Introduction,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        seconds: float,
    ) -> None:
        self._device, self._seconds = device, seconds
        self._set = WeightSet(shapes, {})
        self._num_sent = 0
        self._links: dict[str, WeightLink] = {}
        self._failed: dict[str, str] = {}
        self._taken: dict[str, Tensor] = {}
        self._held: tuple[int, dict[str, Tensor]] = -1, {}
        self._is_open = False  # a server would take a bucket of another update for one of its own
        self._checksums: Mapping[str, int] = {}
        self._dtypes: Mapping[str, str] = {}
        self._knows_dtypes = threading.Event()
        self._lock = threading.Lock()  # buckets of the trainer, commands of the engine
        self._connection = Client(introduction.address, "AF_UNIX", authkey=introduction.key)
        self._connection.send_bytes(rank.to_bytes(8))
        threading.Thread(target=self._serve, name="weight-part", daemon=True).start()

    # --- for the trainer ---------------------------------------------------------------------------------------------

    def begin_update(self, version: int) -> None:
        """Begins the part. To which servers it goes the engine's process says."""
        with self._lock:
            self._set.begin(version)
            self._checksums, self._num_sent = {}, 0

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends one bucket. Servers that fail are the engine's concern.

        Raises:
            WeightSyncError: as `WeightSet.receive`, or the engine's process has given the update up.
        """
        with self._lock:
            if not self._is_open:
                raise WeightSyncError("weight update: none is open", remedy="see the output of the first rank")
            for message in messages(tensors):
                needed = self._set.receive(message)
                if needed:
                    self._send(needed, self._links.keys())

    def end_update(self) -> None:
        """Nothing: the engine's process takes all parts into use together, after this."""

    def abandon_update(self) -> None:
        """Nothing: the engine's process never takes this part, and has the one before sent again."""

    def held_dtypes(self) -> Mapping[str, str]:
        """As servers hold tensors; the engine's process says so when it begins.

        Raises:
            WeightSyncError: it has not.
        """
        if not self._knows_dtypes.wait(self._seconds):
            raise WeightSyncError(
                "weight update: the engine's rank has not begun it",
                seen=f"nothing for {self._seconds:g} s",
                expected="the dtypes of its servers",
                remedy="see the output of the first rank",
            )
        return self._dtypes

    def verify(self, sent: Mapping[str, int]) -> None:
        """Keeps the checksums for the engine's process, which compares them with those of all servers."""
        with self._lock:
            self._checksums = sent

    # --- for the engine's process ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Until the engine is closed, or its process is gone."""
        with self._connection:
            while True:
                try:
                    command = msgspec.json.decode(self._connection.recv_bytes(), type=Command)
                    self._connection.send_bytes(msgspec.json.encode(self._answer(command)))
                except (OSError, EOFError):
                    break
        for link in self._links.values():
            link.close()

    def _answer(self, command: Command) -> Reply:
        try:
            with self._lock:
                checksums = self._do(command)
                failed, self._failed = self._failed, {}
        except WeightSyncError as error:
            return Reply(command.number, problem=str(error))
        return Reply(command.number, "", failed, checksums)

    def _do(self, command: Command) -> dict[str, int | None]:
        match command.do:
            case "begin":
                self._begin(command)
            case "take":
                self._is_open, self._taken = False, self._set.part()
                return {name: self._checksums.get(name) for name in self._taken}
            case "hold":
                self._held, self._taken = (command.version, self._taken), {}
            case "send":
                self._is_open, self._failed = False, {}
                self._resend(command)
        return {}

    def _begin(self, command: Command) -> None:
        wanted = {target.key for target in command.targets}
        for key in self._links.keys() - wanted:
            # Nobody waits for it: the server may be gone.
            threading.Thread(target=self._links.pop(key).close, daemon=True).start()
        self._is_open, self._failed, self._taken = True, {}, {}
        self._connect(command.targets)
        if command.dtypes:
            self._dtypes = command.dtypes
            self._knows_dtypes.set()

    def _resend(self, command: Command) -> None:
        version, tensors = self._held
        if version != command.version:
            raise WeightSyncError("weight update: a part", seen=f"version {version}", expected=command.version)
        self._connect(command.targets)
        self._num_sent, keys = 0, {target.key for target in command.targets}
        for message in messages(tensors.items()):
            self._connection.send_bytes(_BUSY)
            self._send(message, keys)

    def _connect(self, targets: Iterable[Target]) -> None:
        new = {
            target.key: WeightLink(target.name, target.endpoint, target.options, self._device)
            for target in targets
            if target.key not in self._links
        }
        self._note(attempt_all(WeightLink.join, new))
        self._links |= new

    def _send(self, tensors: list[tuple[str, Tensor]], keys: Collection[str]) -> None:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        links = {key: link for key, link in self._links.items() if key in keys}
        failed = attempt_all(lambda link: link.send(tensors, number), links)
        self._note(failed)
        for key in failed:
            del self._links[key]

    def _note(self, failed: Mapping[str, WeightSyncError]) -> None:
        self._failed |= {key: str(error) for key, error in failed.items()}
