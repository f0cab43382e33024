"""The senders of an engine's servers, as the engine sees them.

An engine opens and ends the updates of its servers; senders send the tensors: a `Sender` in this process, or trainer
ranks, which their controller asks (`moerl.ranks.senders`). With S servers one sender would send every byte S times over
its own link. A server takes one bucket at a time, whoever it comes from: R senders keep min(R, S) links busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from moerl.contract.commands import Target
from moerl.contract.weight_update import WeightUpdate
from moerl.rollout.fleet.sender import Sender, buckets


@dataclass(frozen=True, slots=True)
class Part:
    """One sender's part of an update."""

    names: Collection[str] = ()
    """Names of the tensors that the sender sent."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Servers that are out of the update, by key, and why."""


class AllSenders(Protocol):
    """The senders of one engine, wherever they run. Every method raises `WeightSyncError` if one is gone, or could not
    do it."""

    async def begin(self, update: WeightUpdate, targets: Sequence[Target]) -> None:
        """Has the buckets of this update go to these servers, whose updates are open, and to no others."""
        ...

    async def take(self, version: int) -> Sequence[Part]:
        """Closes the set; returns the part of each sender."""
        ...

    async def hold(self, version: int) -> None:
        """Has senders keep the set that was taken last for servers that come late."""
        ...

    async def send(self, version: int, targets: Sequence[Target]) -> Sequence[Part]:
        """Has senders send what they keep to these servers, whose updates are open; returns the part of each."""
        ...

    async def close(self) -> None:
        """Leaves the servers, if senders outlive the engine."""
        ...


class LocalSender:
    """The one sender of tensors that are handed to the engine in its own process: of a model's directory, of versions
    on disk.

    Args:
        bucket_bytes: tensors are sent together up to this size; one that is larger is sent alone.
    """

    def __init__(self, sender: Sender, bucket_bytes: int) -> None:
        self._sender, self._bucket_bytes = sender, bucket_bytes

    async def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends tensors, and returns when they were sent. Raises as `WeightSet.receive`."""
        parts = buckets(tensors, self._bucket_bytes)
        while (bucket := await asyncio.to_thread(next, parts, None)) is not None:
            needed = await asyncio.to_thread(self._sender.weight_set.receive, bucket)
            if needed:
                await self._sender.send(needed)

    def failed(self) -> dict[str, str]:
        return self._sender.failed()

    async def begin(self, update: WeightUpdate, targets: Sequence[Target]) -> None:
        await self._sender.begin(update, targets)

    async def take(self, version: int) -> Sequence[Part]:
        return [Part(self._sender.take(version), self._sender.failed())]

    async def hold(self, version: int) -> None:
        self._sender.hold(version)

    async def send(self, version: int, targets: Sequence[Target]) -> Sequence[Part]:
        for bucket in await self._sender.held(version, targets):
            await self._sender.send(bucket, targets)
        return [Part(failed=self._sender.failed())]

    async def close(self) -> None:
        await self._sender.close()
