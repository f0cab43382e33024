"""The senders of an engine's servers: each keeps its part of every set, and sends it to the servers that are named.

An engine opens and ends the updates of its servers; senders send the tensors: a `Sender` in this process, or trainer
ranks, which their controller asks (`moerl.ranks.senders`). With S servers one sender would send every byte S times over
its own link. A server takes one bucket at a time, whoever it comes from: R senders keep min(R, S) links busy. A sender
runs in an event loop, one call at a time: the engine's own, or in a trainer rank that of a `ServersSink`. The tensors
of an update, or its part of them, are kept in a `WeightSet` while they are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moerl.contract.commands import Target
from moerl.contract.weight_update import Arrivals, WeightUpdate, require_open
from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Bucket, WeightChannel, WeightGroup


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

    async def close_set(self, version: int) -> Sequence[Part]:
        """Closes the set; returns the part of each sender."""
        ...

    async def keep(self, version: int) -> None:
        """Has senders keep the set that was closed last for servers that come late."""

    async def send(self, version: int, targets: Sequence[Target]) -> Sequence[Part]:
        """Has senders send what they keep to these servers, whose updates are open; returns the part of each."""
        ...

    async def close(self) -> None:
        """Leaves the servers, if senders outlive the engine."""


class WeightSet:
    """One update in the making, on the CPU.

    Args:
        tied: names that may come as well, each with the tensor that it must equal; they are not kept.
        keeps_copy: of every tensor; else of those alone that another one is compared with.
    """

    def __init__(self, tied: Mapping[str, str], *, keeps_copy: bool = True) -> None:
        self._tied, self._keeps_copy = tied, keeps_copy
        self._compared = {*tied, *tied.values()}
        self._tensors: dict[str, Tensor | None] = {}
        self._arrivals: Arrivals | None = None

    def begin(self, update: WeightUpdate) -> None:
        """Starts a set; one that was never closed is forgotten."""
        self._tensors, self._arrivals = {}, Arrivals(update)

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Checks each tensor and keeps a copy; returns those that the server needs: not the tied ones.

        Raises:
            WeightSyncError: no set is open, or as `Arrivals.check`.
        """
        arrivals, needed = require_open(self._arrivals), []
        for name, tensor in tensors:
            arrivals.check(name, tensor.shape)
            self._tensors[name] = None
            if self._keeps_copy or name in self._compared:
                copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                self._tensors[name] = copy
            arrivals.names.add(name)
            if name not in self._tied:
                needed.append((name, tensor.detach()))
        return needed

    def drop(self) -> None:
        """Forgets the open set."""
        self._tensors, self._arrivals = {}, None

    def part(self, version: int) -> tuple[Collection[str], dict[str, Tensor | None]]:
        """Closes the set; returns the names of the tensors that have come, and these in the order of the update's list,
        without tied ones. None stands for a tensor of which no copy is kept.

        Raises:
            WeightSyncError: none is open, or one of another version; `receive` has refused a tensor; or a tied tensor
                is not the one it is tied to.
        """
        arrivals, staged = require_open(self._arrivals), self._tensors
        update = arrivals.update
        if version != update.version:
            raise WeightSyncError("weight update: a part", seen=f"version {update.version}", expected=version)
        arrivals.require_good()
        for name, owner in self._tied.items():
            tensor, other = staged.get(name), staged.get(owner)
            if tensor is not None and other is not None and not torch.equal(tensor, other):
                raise WeightSyncError(
                    f"weight update: tensor {name!r}", seen="other values", expected=f"those of {owner!r}, its tied one"
                )
        self.drop()
        return arrivals.names, {n: staged[n] for n in update.tensors if n in staged and n not in self._tied}


class Sender:
    """A sender of a part of every set, or the one sender (`AllSenders`) of all of it. A server that fails gets no more
    buckets; it comes back under another key.

    Args:
        weight_set: keeps the tensors of a set while it is sent.
        open_channel: raises WeightSyncError if a server was lost meanwhile.
        bucket_bytes: what is kept is sent in buckets of up to this size; a tensor that is larger is sent alone.
        together: servers may pass buckets on to one another. False if other senders send to them at the same time: a
            server takes one bucket at a time, and two buckets that servers pass on would wait for each other.

    Attributes:
        bucket_bytes: as given.
        weight_set: takes the buckets of the set that was begun, in any one thread, and returns them for `send_bucket`.
    """

    def __init__(
        self,
        weight_set: WeightSet,
        open_channel: Callable[[Target], WeightChannel],
        bucket_bytes: int,
        *,
        together: bool,
    ) -> None:
        self.weight_set, self.bucket_bytes = weight_set, bucket_bytes
        self._num_sent = 0
        self._closed: dict[str, Tensor | None] = {}
        self._kept: tuple[int, dict[str, Tensor | None]] = -1, {}
        self._open_channel, self._together = open_channel, together
        self._channels: dict[str, WeightChannel] = {}
        self._groups: dict[str, WeightGroup] = {}
        self._failed: dict[str, str] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def begin(self, update: WeightUpdate, targets: Sequence[Target]) -> None:
        """Starts a set, which goes to these servers and to no others; one that was never closed is forgotten."""
        self.weight_set.begin(update)
        self._num_sent, self._closed, self._failed = 0, {}, {}
        for key in self._channels.keys() - {target.key for target in targets}:
            # Nobody waits for it: the server may be gone.
            leaving = asyncio.create_task(_leave(self._forget(key)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        self._open(targets)

    async def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends tensors, and returns when they were sent. Raises as `WeightSet.receive`."""
        parts = buckets(tensors, self.bucket_bytes)
        while (bucket := await asyncio.to_thread(next, parts, None)) is not None:
            needed = await asyncio.to_thread(self.weight_set.receive, bucket)
            if needed:
                await self.send_bucket(needed)

    async def send_bucket(self, bucket: Bucket, targets: Sequence[Target] | None = None) -> None:
        """Sends a bucket of `weight_set` or of `kept` to these servers, or to those of `begin` if None. `failed` names
        servers that fail."""
        number, self._num_sent = self._num_sent, self._num_sent + 1
        keys = self._channels.keys() if targets is None else {target.key for target in targets}
        members: dict[str, dict[str, WeightChannel]] = {}
        for key, channel in self._channels.items():
            if key in keys:
                members.setdefault(channel.network if self._together else key, {})[key] = channel
        for name, channels in members.items():
            if name not in self._groups:
                self._groups[name] = next(iter(channels.values())).new_group()
        sends = (self._groups[name].send(bucket, channels, number) for name, channels in members.items())
        results = await asyncio.gather(*sends, return_exceptions=True)
        for channels, result in zip(members.values(), results, strict=True):
            await self._leave_failed(channels, result)

    async def close_set(self, version: int) -> Sequence[Part]:
        """Closes the set. Raises as `WeightSet.part`."""
        names, self._closed = self.weight_set.part(version)
        return [Part(names, self._failed)]

    async def keep(self, version: int) -> None:
        """Keeps the set that was closed last, which is of this version, for `kept`."""
        self._kept, self._closed = (version, self._closed), {}

    async def send(self, version: int, targets: Sequence[Target]) -> Sequence[Part]:
        """Sends what is kept. Raises as `kept`."""
        for bucket in await self.kept(version, targets):
            await self.send_bucket(bucket, targets)
        return [Part(failed=self._failed)]

    async def kept(self, version: int, targets: Sequence[Target]) -> list[Bucket]:
        """Returns what is kept, in buckets, to `send_bucket` to these servers, whose updates are open. A set that is
        open is forgotten.

        Raises:
            WeightSyncError: it is of another version, or no copy is kept.
        """
        self.weight_set.drop()
        self._failed = {}
        kept_version, tensors = self._kept
        if kept_version != version:
            raise WeightSyncError(
                "weight update: what a sender keeps for late servers",
                seen=f"version {kept_version}",
                expected=f"version {version}",
                remedy="resume the run from its last checkpoint",
            )
        copies = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if len(copies) < len(tensors):
            raise WeightSyncError(
                "weight update: no copy of the weights is kept",
                seen="a server that needs all weights again",
                expected="more than one server, or servers that the run starts itself",
                remedy="resume the run from its last checkpoint",
            )
        self._open(targets)
        self._num_sent = 0
        return list(buckets(copies.items(), self.bucket_bytes))

    def failed(self) -> dict[str, str]:
        """Returns the servers that have failed since the last call, by key, and why."""
        failed, self._failed = self._failed, {}
        return failed

    async def close(self) -> None:
        """Leaves the servers, which keep running."""
        self.weight_set.drop()
        channels = [self._forget(key) for key in list(self._channels)]
        for group in self._groups.values():
            group.leave()
        await asyncio.gather(*(_leave(channel) for channel in channels), *self._leaving)

    def _open(self, targets: Iterable[Target]) -> None:
        """Opens channels to servers that have none yet."""
        for target in targets:
            if target.key in self._channels:
                continue
            try:
                self._channels[target.key] = self._open_channel(target)
            except (WeightSyncError, OSError) as error:
                self._failed[target.key] = str(error)

    async def _leave_failed(
        self, channels: Mapping[str, WeightChannel], result: Mapping[str, WeightSyncError] | BaseException
    ) -> None:
        """Leaves the servers of a group to which a bucket was not sent."""
        if isinstance(result, (RuntimeError, OSError, ValueError)):  # of torch's process groups, of addresses
            failed = WeightSyncError(f"weight update: {type(result).__name__}", seen=result, expected="a whole update")
            result = dict.fromkeys(channels, failed)
        elif isinstance(result, BaseException):
            raise result
        for key, error in result.items():
            self._failed[key] = str(error)
            if key in self._channels:  # not left meanwhile
                await self._forget(key).abandon()

    def _forget(self, key: str) -> WeightChannel:
        if not self._together and key in self._groups:
            self._groups.pop(key).leave()
        return self._channels.pop(key)


async def attempt[T](step: Callable[[T], Awaitable[None]], on: T | None) -> WeightSyncError | None:
    """Runs a step of a weight update on one server, or on a channel to one; returns why it failed, None if it did
    not."""
    if on is None:
        return WeightSyncError("weight update: the server was lost meanwhile")
    try:
        await step(on)
    except WeightSyncError as error:
        return error
    except (RuntimeError, OSError, ValueError) as error:  # of torch's process groups, of a client closed meanwhile
        return WeightSyncError(f"weight update: {type(error).__name__}", seen=error, expected="a whole update")
    return None


async def _leave(channel: WeightChannel) -> None:
    """Leaves a server. Ignores errors: a server without an answer is gone, or will notice."""
    await attempt(lambda channel: channel.close(), channel)


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields consecutive tensors of up to `bucket_bytes` together; one that is larger comes alone."""
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
