"""The servers that one sender sends its buckets to, and which of them have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

from moerl.contract.commands import Target
from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Bucket, WeightChannel, WeightGroup


class Receivers:
    """The servers that one sender sends to. One that fails gets no more buckets; it comes back under another key.

    Args:
        open_channel: raises WeightSyncError if a server was lost meanwhile.
        together: servers may pass buckets on to one another. False if other senders send to them at the same time: a
            server takes one bucket at a time, and two buckets that servers pass on would wait for each other.
    """

    def __init__(self, open_channel: Callable[[Target], WeightChannel], *, together: bool) -> None:
        self._open_channel, self._together = open_channel, together
        self._channels: dict[str, WeightChannel] = {}
        self._groups: dict[str, WeightGroup] = {}
        self._failed: dict[str, str] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def replace(self, targets: Iterable[Target]) -> None:
        """Has buckets go to these servers from now on, and to no others. Called in an event loop."""
        targets = list(targets)
        for key in self._channels.keys() - {target.key for target in targets}:
            # Nobody waits for it: the server may be gone.
            leaving = asyncio.create_task(_leave(self._forget(key)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        self.add(targets)

    def add(self, targets: Iterable[Target]) -> None:
        """Opens channels to servers that have none yet."""
        for target in targets:
            if target.key in self._channels:
                continue
            try:
                self._channels[target.key] = self._open_channel(target)
            except (WeightSyncError, OSError) as error:
                self._failed[target.key] = str(error)

    async def send(self, bucket: Bucket, number: int, keys: Collection[str] | None = None) -> None:
        """Sends a bucket to the servers with these keys (all when None). number: of the bucket in its update."""
        members: dict[str, dict[str, WeightChannel]] = {}
        for key, channel in self._channels.items():
            if keys is None or key in keys:
                members.setdefault(channel.network if self._together else key, {})[key] = channel
        await asyncio.gather(*(self._send(name, channels, bucket, number) for name, channels in members.items()))

    def failed(self) -> dict[str, str]:
        """Returns the servers that have failed since the last call, by key, and why."""
        failed, self._failed = self._failed, {}
        return failed

    async def close(self) -> None:
        """Leaves the servers, which keep running."""
        channels = [self._forget(key) for key in list(self._channels)]
        for group in self._groups.values():
            group.leave()
        self._groups = {}
        await asyncio.gather(*(_leave(channel) for channel in channels), *self._leaving)

    async def _send(self, name: str, channels: dict[str, WeightChannel], bucket: Bucket, number: int) -> None:
        if name not in self._groups:
            self._groups[name] = next(iter(channels.values())).new_group()
        try:
            errors = await self._groups[name].send(bucket, channels, number)
        except (RuntimeError, OSError, ValueError) as error:  # of torch's process groups, of addresses
            failed = WeightSyncError(f"weight update: {type(error).__name__}", seen=error, expected="a whole update")
            errors = dict.fromkeys(channels, failed)
        for key, error in errors.items():
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


async def _close(channel: WeightChannel) -> None:
    await channel.close()


async def _leave(channel: WeightChannel) -> None:
    """Leaves a server. Ignores errors: a server without an answer is gone, or will notice."""
    await attempt(_close, channel)
