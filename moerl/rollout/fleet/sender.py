"""One sender of weights: keeps its part of every set, and sends it to the servers that its caller names.

Runs in an event loop, one call at a time: the engine's own, or in a trainer rank that of a `ServersSink`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor

from moerl.contract.commands import Target
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import Bucket
from moerl.rollout.fleet.receivers import Receivers
from moerl.rollout.fleet.weight_set import WeightSet


class Sender:
    """A sender of a part of every set, or of all of it.

    Args:
        weight_set: keeps the tensors of a set while it is sent.
        receivers: servers that they go to.
        bucket_bytes: what is kept is sent in buckets of up to this size; a tensor that is larger is sent alone.

    Attributes:
        weight_set: takes the buckets of the set that was begun, in any one thread, and returns them for `send`.
    """

    def __init__(self, weight_set: WeightSet, receivers: Receivers, bucket_bytes: int) -> None:
        self.weight_set, self._receivers, self._bucket_bytes = weight_set, receivers, bucket_bytes
        self._num_sent = 0
        self._taken: dict[str, Tensor | None] = {}
        self._held: tuple[int, dict[str, Tensor | None]] = -1, {}

    async def begin(self, update: WeightUpdate, targets: Sequence[Target]) -> None:
        """Starts a set, which goes to these servers and to no others; one that was never taken is forgotten."""
        self.weight_set.begin(update)
        self._num_sent, self._taken = 0, {}
        self._receivers.failed()
        self._receivers.replace(targets)

    async def send(self, bucket: Bucket, targets: Sequence[Target] | None = None) -> None:
        """Sends a bucket of `weight_set` or of `held` to these servers, or to those of `begin` if None. `failed` names
        servers that fail."""
        number, self._num_sent = self._num_sent, self._num_sent + 1
        await self._receivers.send(bucket, number, None if targets is None else {target.key for target in targets})

    def take(self, version: int) -> Collection[str]:
        """Closes the set; returns the names of the tensors in it. Raises as `WeightSet.part`."""
        names, self._taken = self.weight_set.part(version)
        return names

    def hold(self, version: int) -> None:
        """Keeps what was taken last, which is of this version, for `held`."""
        self._held, self._taken = (version, self._taken), {}

    async def held(self, version: int, targets: Sequence[Target]) -> list[Bucket]:
        """Returns what is kept, in buckets, to `send` to these servers, whose updates are open. A set that is open is
        forgotten.

        Raises:
            WeightSyncError: it is of another version, or no copy is kept.
        """
        self.weight_set.drop()
        self._receivers.failed()
        held_version, tensors = self._held
        if held_version != version:
            raise WeightSyncError(
                "weight update: what a sender keeps for late servers",
                seen=f"version {held_version}",
                expected=f"version {version}",
                remedy="resume the run from its last checkpoint",
            )
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if len(kept) < len(tensors):
            raise WeightSyncError(
                "weight update: no copy of the weights is kept",
                seen="a server that needs all weights again",
                expected="more than one server, or servers that the run starts itself",
                remedy="resume the run from its last checkpoint",
            )
        self._receivers.add(targets)
        self._num_sent = 0
        return list(buckets(kept.items(), self._bucket_bytes))

    def failed(self) -> dict[str, str]:
        """Returns the servers that have failed since the last call, by key, and why."""
        return self._receivers.failed()

    async def close(self) -> None:
        """Leaves the servers."""
        self.weight_set.drop()
        await self._receivers.close()


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
