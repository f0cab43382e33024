"""The servers that one sender sends its buckets to: each over a channel of its own, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Bucket, WeightChannel


@dataclass(frozen=True, slots=True)
class Target:
    """A server as senders reach it. key: of the engine's connection to it; a server that took its place has another.
    address: as `ServerBackend.address`."""

    key: str
    name: str
    address: dict[str, Any]


class Receivers:
    """Who gets buckets, and who failed. A server that fails gets no more; it comes back under another key.

    Belongs to one event loop. `open_channel` raises WeightSyncError where a server was lost meanwhile.
    """

    def __init__(self, open_channel: Callable[[Target], WeightChannel]) -> None:
        self._open_channel = open_channel
        self._channels: dict[str, WeightChannel] = {}
        self._failed: dict[str, str] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def replace(self, targets: Iterable[Target]) -> None:
        """From now on buckets go to these servers, and to no others."""
        targets = list(targets)
        for key in self._channels.keys() - {target.key for target in targets}:
            # Nobody waits for it: the server may be gone.
            leaving = asyncio.create_task(_leave(self._channels.pop(key)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        await self.add(targets)

    async def add(self, targets: Iterable[Target]) -> None:
        """Connects to servers that are not connected yet."""
        await asyncio.gather(*(self._join(target) for target in targets if target.key not in self._channels))

    async def send(self, bucket: Bucket, number: int, keys: Collection[str] | None = None) -> None:
        """Sends a bucket to the servers with these keys (all when None). number: of the bucket in its update."""
        among = list(self._channels) if keys is None else [key for key in self._channels if key in keys]
        await asyncio.gather(*(self._step(key, self._channels[key], _sending(bucket, number)) for key in among))

    def failed(self) -> dict[str, str]:
        """The servers that have failed since this was asked last, by key, and why."""
        failed, self._failed = self._failed, {}
        return failed

    async def close(self) -> None:
        """Leaves the servers, which keep running."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(_leave(channel) for channel in channels.values()), *self._leaving)

    async def _join(self, target: Target) -> None:
        try:
            channel = self._open_channel(target)
        except WeightSyncError as error:
            self._failed[target.key] = str(error)
            return
        self._channels[target.key] = channel
        await self._step(target.key, channel, _join)

    async def _step(self, key: str, channel: WeightChannel, step: Callable[[WeightChannel], Awaitable[None]]) -> None:
        error = await attempt(step, channel)
        if error is not None:
            self._failed[key] = str(error)
            self._channels.pop(key, None)
            await channel.abandon()


async def attempt[T](step: Callable[[T], Awaitable[None]], on: T | None) -> WeightSyncError | None:
    """A step of a weight update on one server, or on a channel to one; why it failed."""
    if on is None:
        return WeightSyncError("weight update: the server was lost meanwhile")
    try:
        await step(on)
    except WeightSyncError as error:
        return error
    except (RuntimeError, OSError, ValueError) as error:  # of torch's process groups, of a client closed meanwhile
        return WeightSyncError(f"weight update: {type(error).__name__}", seen=error, expected="a whole update")
    return None


def _sending(bucket: Bucket, number: int) -> Callable[[WeightChannel], Awaitable[None]]:
    return lambda channel: channel.send(bucket, number)


async def _join(channel: WeightChannel) -> None:
    await channel.join()


async def _close(channel: WeightChannel) -> None:
    await channel.close()


async def _leave(channel: WeightChannel) -> None:
    """A server that cannot be told is gone, or will notice."""
    await attempt(_close, channel)
