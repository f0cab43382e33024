"""A trainer rank's way of buckets to the servers of an engine. Runs in a sender, in the thread that calls its sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from moerl.contract.commands import Target
from moerl.contract.weight_update import WeightUpdate
from moerl.rollout.fleet.backend import Bucket, WeightChannel
from moerl.rollout.fleet.sender import Sender, WeightSet


class ServersSink:
    """A `WeightSink` that sends this rank's part of every set to servers, and keeps it for those that come late.

    The engine begins and ends the updates of servers, around those of this sink. Between two updates its event loop
    stands still: connections that lie idle meanwhile are not used again.

    Args:
        open_channel: of the servers' backend.
        bucket_bytes: as of `Sender`.
        keeps_copy: as in `EngineOptions`.
        together: as of `Sender`.

    Attributes:
        targets: the servers that the next update goes to.
    """

    def __init__(
        self, open_channel: Callable[[Target], WeightChannel], bucket_bytes: int, *, keeps_copy: bool, together: bool
    ) -> None:
        weight_set = WeightSet({}, keeps_copy=keeps_copy)
        self._sender = Sender(weight_set, open_channel, bucket_bytes, together=together)
        self._loop, self._version = asyncio.new_event_loop(), -1
        self._run = self._loop.run_until_complete
        self.targets: Sequence[Target] = ()

    def begin_update(self, update: WeightUpdate) -> None:
        self._version = update.version
        self._run(self._sender.begin(update, self.targets))

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends one bucket. Servers that fail are named by `failed`. Raises as `WeightSet.receive`."""
        self._run(self._sender.send_bucket(self._sender.weight_set.receive(tensors)))

    def end_update(self) -> None:
        """Closes the part. Raises as `WeightSet.part`."""
        self._run(self._sender.close_set(self._version))

    def abandon_update(self) -> None:
        """Does nothing: the engine has the version before sent again."""

    def keep(self, version: int) -> None:
        """Keeps the set that was closed last, which is of this version, for `kept`."""
        self._run(self._sender.keep(version))

    def kept(self, version: int, targets: Sequence[Target]) -> list[Bucket]:
        """Returns what is kept, in buckets, to `resend` to these servers. Raises as `Sender.kept`."""
        return self._run(self._sender.kept(version, targets))

    def resend(self, bucket: Bucket, targets: Sequence[Target]) -> None:
        """Sends a bucket of `kept` to these servers."""
        self._run(self._sender.send_bucket(bucket, targets))

    def failed(self) -> dict[str, str]:
        """Returns the servers that have failed since the last call, by key, and why."""
        return self._sender.failed()

    def close(self) -> None:
        """Leaves the servers, which keep running."""
        self._run(self._sender.close())
        self._loop.close()
