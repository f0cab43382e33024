"""A trainer rank that sends its part of every set of weights to the servers of an engine in another process.

It keeps its part for servers that come late, and does what `Senders` of the engine's process tells it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

import msgspec
import torch
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.senders import Command, Introduction, Reply, Target, connect
from moerl.rollout.sglang.targets import attempt_all, messages
from moerl.rollout.sglang.weight_set import WeightSet
from moerl.rollout.sglang.weights import WeightLink

_BUSY = b""
"""Sent before a reply that takes long, after each bucket."""


class ShardSender:
    """A `CheckedSink` that sends its part of every set, and keeps it for late servers.

    Args:
        rank: of this sender.
        introduction: of the engine's process.
        shapes: as in `EngineOptions`.
        device: of this rank; NCCL sends from it.
        seconds: that the engine's process has to take the connection, and to begin an update.

    Raises:
        WeightSyncError: as `connect`.
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
        self._open_version: int | None = None  # a server would take a bucket of another update for one of its own
        self._checksums: Mapping[str, int] = {}
        self._dtypes: Mapping[str, str] = {}
        self._knows_dtypes = threading.Event()
        self._lock = threading.Lock()  # buckets of the trainer, commands of the engine
        self._connection = connect(introduction, rank, seconds)
        threading.Thread(target=self._serve, name="shard-sender", daemon=True).start()

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
            if self._open_version is None or self._open_version != self._set.version:
                raise WeightSyncError(
                    "weight update: none is open",
                    seen=f"a bucket of version {self._set.version}",
                    expected="no update" if self._open_version is None else f"version {self._open_version}",
                    remedy="see the output of the engine's process",
                )
            for message in messages(tensors):
                needed = self._set.receive(message)
                if needed:
                    self._send(needed, self._links.keys())

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
                self._open_version, self._taken = None, self._set.part(command.version)
                return {name: self._checksums.get(name) for name in self._taken}
            case "hold":
                self._held, self._taken = (command.version, self._taken), {}
            case "send":
                self._open_version, self._failed = None, {}
                self._resend(command)
        return {}

    def _begin(self, command: Command) -> None:
        wanted = {target.key for target in command.targets}
        for key in self._links.keys() - wanted:
            # Nobody waits for it: the server may be gone.
            threading.Thread(target=self._links.pop(key).close, daemon=True).start()
        self._open_version, self._failed, self._taken = command.version, {}, {}
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
