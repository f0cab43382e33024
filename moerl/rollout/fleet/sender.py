"""One sender of weights: keeps its part of every set, and sends it to the servers that the engine's process names.

Runs in an event loop: the engine's own where the trainer is in the same process, else that of a `ShardSender`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Bucket
from moerl.rollout.fleet.receivers import Receivers
from moerl.rollout.fleet.senders import Command, Reply
from moerl.rollout.fleet.weight_set import WeightSet


class Sender:
    """A part of every set, or all of it.

    Args:
        weight_set: what may come.
        receivers: to whom it goes.
        bucket_bytes: tensors are sent together up to this size; one that is larger is sent alone.

    Attributes:
        dtypes: as `CheckedSink.held_dtypes`; None until the engine's process has said them.
        checksums: of the tensors that have come, as the trainer computed them.
    """

    def __init__(self, weight_set: WeightSet, receivers: Receivers, bucket_bytes: int) -> None:
        self._set, self._receivers, self._bucket_bytes = weight_set, receivers, bucket_bytes
        self._num_sent = 0
        self._taken: dict[str, Tensor | None] = {}
        self._held: tuple[int, dict[str, Tensor | None]] = -1, {}
        # A server would take a bucket of another update for one of its own.
        self._open_version: int | None = None
        self._lock = asyncio.Lock()  # buckets of the trainer, commands of the engine's process
        self.checksums: Mapping[str, int] = {}
        self.dtypes: Mapping[str, str] | None = None

    async def begin_set(self, version: int) -> None:
        """Starts the trainer's next set; one that was never taken is forgotten."""
        async with self._lock:
            self._set.begin(version)
            self.checksums, self._num_sent = {}, 0

    async def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends tensors, and returns when they were sent. Servers that fail are the engine's concern.

        Raises:
            WeightSyncError: as `WeightSet.receive`, or the engine's process has no update of this version open.
        """
        async with self._lock:
            if self._open_version is None or self._open_version != self._set.version:
                raise WeightSyncError(
                    "weight update: none is open",
                    seen=f"a bucket of version {self._set.version}",
                    expected="no update" if self._open_version is None else f"version {self._open_version}",
                    remedy="call begin_update first; see the output of the engine's process",
                )
            parts = buckets(tensors, self._bucket_bytes)
            while (bucket := await asyncio.to_thread(next, parts, None)) is not None:
                needed = await asyncio.to_thread(self._set.receive, bucket)
                if needed:
                    await self._send(needed, None)

    async def do(self, command: Command, busy: Callable[[], None]) -> Reply:
        """What the engine's process says. busy: called where there is still more to send."""
        try:
            async with self._lock:
                checksums = await self._do(command, busy)
                return Reply(command.number, "", self._receivers.failed(), checksums)
        except WeightSyncError as error:
            return Reply(command.number, problem=str(error))

    def failed(self) -> dict[str, str]:
        """As `Receivers.failed`."""
        return self._receivers.failed()

    async def close(self) -> None:
        """Leaves the servers."""
        self._open_version = None
        await self._receivers.close()

    async def _do(self, command: Command, busy: Callable[[], None]) -> dict[str, int | None]:
        match command.do:
            case "begin":
                self._open_version, self._taken = command.version, {}
                self._receivers.failed()
                self._receivers.replace(command.targets)
                self.dtypes = command.dtypes or self.dtypes
            case "take":
                self._open_version, self._taken = None, self._set.part(command.version)
                return {name: self.checksums.get(name) for name in self._taken}
            case "hold":
                self._held, self._taken = (command.version, self._taken), {}
            case "send":
                self._open_version = None
                self._receivers.failed()
                await self._send_held(command, busy)
        return {}

    async def _send_held(self, command: Command, busy: Callable[[], None]) -> None:
        version, tensors = self._held
        if version != command.version:
            raise WeightSyncError("weight update: a part", seen=f"version {version}", expected=command.version)
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if len(kept) < len(tensors):
            raise WeightSyncError(
                "weight update: no copy of the weights is kept",
                seen="a server that needs all weights again",
                expected="more than one server, or servers that the run starts itself",
                remedy="resume the run from its last checkpoint",
            )
        self._receivers.add(command.targets)
        self._num_sent, keys = 0, {target.key for target in command.targets}
        for bucket in buckets(kept.items(), self._bucket_bytes):
            busy()
            await self._send(bucket, keys)

    async def _send(self, bucket: Bucket, keys: set[str] | None) -> None:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        await self._receivers.send(bucket, number, keys)


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of up to `bucket_bytes` together; one that is larger comes alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket
