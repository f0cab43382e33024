"""Weight updates of an engine's servers: begun, ended, checked, repeated for servers that come late. In its event loop.

Senders send the tensors: trainer ranks, or one in this process (`moerl.rollout.fleet.sender`). Each keeps what it
sent, so that a server that takes the place of a lost one, or was away, gets the set before it gets requests. An
incomplete set leaves mixed weights on servers; they get the set before it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor

from moerl.contract.commands import Target
from moerl.contract.weight_update import WeightUpdate, require_open, require_whole
from moerl.errors import WeightSyncError
from moerl.rollout.fleet.backend import ServerBackend
from moerl.rollout.fleet.replica import Replica
from moerl.rollout.fleet.sender import AllSenders, Part, Sender, attempt
from moerl.rollout.weight_difference import weight_difference


class Updates:
    """The sets of weights of one engine.

    The caller of `begin`, `receive`, `end`, `on_each` or `give_up` calls `failed` afterwards, also if they raised.

    Args:
        tied: as in `EngineOptions`.
        sender: of this process; until `send_by`.

    Attributes:
        held: version that servers should hold; None before the first update.
        update: the update that has begun and not ended; None if there is none.
    """

    def __init__(self, tied: Collection[str], sender: Sender) -> None:
        self.held: int | None = None
        self.update: WeightUpdate | None = None
        self._tied = tied
        self._sent: tuple[int, Mapping[str, int]] | None = None
        self._dtypes: Mapping[str, str] | None = None
        self._targets: dict[str, Replica] = {}  # by key: a server that takes the place of one is not in its update
        # Held from the beginning to the end of an update, and while a late server is brought up.
        self._lock = asyncio.Lock()
        self._local = sender
        self._senders: AllSenders = sender
        self._holders: AllSenders = sender
        self._names: set[str] = set()
        self._failed: list[tuple[Replica, WeightSyncError]] = []

    def send_by(self, senders: AllSenders) -> None:
        """Has these send every set from the next update on; this process then sends nothing. Until that update ends the
        sender here keeps what it holds."""
        self._senders = senders

    def failed(self) -> list[tuple[Replica, WeightSyncError]]:
        """Returns the servers that have left the update since the last call, and why."""
        failed, self._failed = self._failed, []
        return failed

    async def begin(self, update: WeightUpdate, replicas: Callable[[], Sequence[Replica]]) -> None:
        """Starts the update of the replicas that are current when it can begin; one that was never ended is forgotten.

        Raises:
            WeightSyncError: a sender is gone. Call `give_up` then.
        """
        if self.update is None:
            await self._lock.acquire()
        self.update = update
        self._targets = {replica.key: replica for replica in replicas()}
        await self._on_all(lambda server: server.begin_update())
        await self._senders.begin(update, self._reached())

    async def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends tensors, and returns when they were sent.

        Raises:
            WeightSyncError: as `WeightSet.receive`; or trainer ranks send the set.
        """
        if self._senders is not self._local:
            raise WeightSyncError(
                "weight update: a bucket in the engine's process",
                expected="buckets of its senders alone",
                remedy="have a trainer rank send the bucket",
            )
        try:
            await self._local.receive(tensors)
        finally:
            self._drop(self._local.failed())

    async def end(self) -> None:
        """Takes the set into use; servers sample again once `on_each` has them `resume`.

        Raises:
            WeightSyncError: the set is incomplete, or a sender is gone. Call `give_up` then.
        """
        update = require_open(self.update)
        version = update.version
        parts = await self._senders.close_set(version)
        self._drop_failed(parts)
        require_whole(update, [part.names for part in parts])
        await self._senders.keep(version)
        await self._on_all(lambda server: server.end_update(version))
        self.held, self._holders = version, self._senders
        self._names = update.tensors.keys() - self._tied
        self._close()

    async def on_each(self, step: Callable[[ServerBackend], Awaitable[None]], replicas: Sequence[Replica]) -> None:
        """Runs a step, such as `resume` or `sleep`, on servers that are in no update, side by side."""
        errors = await asyncio.gather(*(attempt(step, replica.server) for replica in replicas))
        self._failed += [(r, error) for r, error in zip(replicas, errors, strict=True) if error is not None]

    async def give_up(self) -> None:
        """Brings servers back to what they held before, in place of `end`. All of them have failed if they held
        nothing.

        Raises:
            WeightSyncError: a sender is gone, and all servers have failed.
        """
        try:
            if self.held is None:
                self._drop_all(WeightSyncError("weight update: broken off, and there was none before it"))
            else:
                await self._send_held(self.held)
        except WeightSyncError as error:
            self._drop_all(error)
            raise
        finally:
            self._close()

    async def bring_up(self, replica: Replica) -> None:
        """Has a server that comes late hold what it should, if anything was sent yet.

        Raises:
            WeightSyncError: a step failed, or it then does not hold what was sent.
        """
        async with self._lock:
            if self.held is None:
                return
            self._targets = {replica.key: replica}
            try:
                await self._send_held(self.held)
            finally:
                failed, self._targets = self.failed(), {}
            error = failed[0][1] if failed else await self.check(replica)
            if error is not None:
                raise error

    async def _send_held(self, version: int) -> None:
        """Makes a whole update of the targets to the version that they should hold, after which they sample."""
        await self._on_all(lambda server: server.begin_update())
        self._drop_failed(await self._holders.send(version, self._reached()))
        await self._on_all(lambda server: server.end_update(version))
        await self._on_all(lambda server: server.resume())

    async def dtypes(self, replica: Callable[[], Awaitable[Replica]]) -> Mapping[str, str]:
        """Returns names of dtypes by checkpoint name, as servers hold tensors; a `replica` is asked the first time."""
        if self._dtypes is None:
            self._dtypes = await require_server(await replica()).dtypes()
        return self._dtypes

    def sent(self, checksums: Mapping[str, int]) -> None:
        """Takes the checksums of the set that was taken into use last.

        Raises:
            WeightSyncError: no update was taken into use, or a tensor was sent that has no checksum.
        """
        if self.held is None:
            raise WeightSyncError("weight update: none was taken", remedy="call begin_update first")
        if unknown := sorted(self._names - checksums.keys()):
            raise WeightSyncError(
                "weight update: tensors without a checksum of their sender",
                seen=f"{len(unknown)} of {len(self._names)}, the first is {unknown[0]!r}",
                expected="a checksum of every tensor that was sent",
                remedy="let the trainer verify the versions that the engine verifies",
            )
        self._sent = self.held, checksums

    async def check(self, replica: Replica) -> WeightSyncError | None:
        """Compares a server's tensors with the checksums of the set in use. Returns an error that names the tensors
        which differ, or says why the server did not answer; None if all agree, or if no checksums are known."""
        if self._sent is None or self._sent[0] != self.held:
            return None
        try:
            return weight_difference(replica.name, self._sent[1], await require_server(replica).digests())
        except WeightSyncError as error:
            return error

    async def close(self) -> None:
        """Leaves the senders; the one in this process leaves the servers."""
        await self._senders.close()
        if self._holders is not self._senders:
            await self._holders.close()

    async def _on_all(self, step: Callable[[ServerBackend], Awaitable[None]]) -> None:
        """Runs one step on every server that is still in the update, side by side; those that fail are out of it."""
        servers = self._servers()
        errors = await asyncio.gather(*(attempt(step, server) for server in servers.values()))
        self._drop({key: str(error) for key, error in zip(servers, errors, strict=True) if error is not None})

    def _reached(self) -> list[Target]:
        """Returns the servers that are still in the update, for senders."""
        servers = self._servers().items()
        return [Target(key, self._targets[key].name, dict(server.address)) for key, server in servers if server]

    def _drop_failed(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._drop(part.failed)

    def _servers(self) -> dict[str, ServerBackend | None]:
        """Returns the servers of the update by key; None for one that was lost meanwhile."""
        return {key: replica.server if replica.key == key else None for key, replica in self._targets.items()}

    def _drop(self, errors: Mapping[str, str]) -> None:
        """Takes servers out of the update; those that are not in it do not matter."""
        for key, text in errors.items():
            replica = self._targets.pop(key, None)
            if replica is not None:
                self._failed.append((replica, WeightSyncError(text)))

    def _drop_all(self, error: WeightSyncError) -> None:
        self._drop(dict.fromkeys(list(self._targets), str(error)))

    def _close(self) -> None:
        self.update, self._targets = None, {}
        self._lock.release()


def require_server(replica: Replica) -> ServerBackend:
    """Returns the server of a place. Raises WeightSyncError if it was lost meanwhile."""
    if replica.server is None:
        raise WeightSyncError(f"server {replica.name!r} was lost meanwhile")
    return replica.server
