"""Weight updates of an engine's servers: what is sent, what is kept for those that come later. Runs in its event loop.

Buckets go to all servers side by side as they arrive, and a copy of the set is kept in this process: a server that
takes the place of a lost one, or was away, gets it before it gets requests. An incomplete set leaves mixed weights on
servers; they get the set before it again. Where senders in other processes send the set, each keeps its part and does
what this process tells it, and this process keeps no tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.held import ServedModel, held_checksums, held_dtypes
from moerl.rollout.sglang.member import Member
from moerl.rollout.sglang.senders import Command, Reply, Senders, Target
from moerl.rollout.sglang.targets import attempt, messages
from moerl.rollout.sglang.weight_set import WeightSet
from moerl.rollout.sglang.weights import WeightLink
from moerl.rollout.witness import mismatch


class Updates:
    """The sets of weights of one engine.

    Who calls `begin`, `receive`, `end`, `go_on` or `give_up` asks for `failed` afterwards, also where they raised.

    Attributes:
        held: version and tensors that servers should hold, no tensors where senders keep them; None before the first
            update.
        is_open: an update has begun and not ended.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str], seconds: float) -> None:
        """shapes, tied: as in `EngineOptions`. seconds: that a server has to say what it holds."""
        self.held: tuple[int, Mapping[str, Tensor]] | None = None
        self.is_open = False
        self._shapes, self._tied, self._seconds = shapes, tied, seconds
        self._sent: tuple[int, Mapping[str, int]] | None = None
        self._dtypes: Mapping[str, str] | None = None
        self._set = WeightSet(shapes, tied)
        self._targets: list[Member] = []
        self._num_messages = 0
        # Held from the beginning to the end of an update, and while a late server is brought up.
        self._lock = asyncio.Lock()
        self._senders: Senders | None = None
        self._senders_hold = False
        self._senders_checksums: dict[str, int | None] = {}
        self._told_dtypes = False
        self._failed: list[tuple[Member, WeightSyncError]] = []

    def share(self, senders: Senders) -> None:
        """From the next update on these send every set, and this process sends nothing."""
        self._senders = senders

    def stage(self, version: int) -> None:
        """Makes room for a set; one that was never ended is forgotten. Servers go on.

        Raises:
            WeightSyncError: not a version.
        """
        self._set.begin(version)

    def failed(self) -> list[tuple[Member, WeightSyncError]]:
        """The servers that are out of the update since this was asked last, and why."""
        failed, self._failed = self._failed, []
        return failed

    async def begin(self, members: Callable[[], Sequence[Member]]) -> None:
        """Starts the update of the members that are current when it can begin.

        Raises:
            WeightSyncError: a sender is gone. Call `give_up` then.
        """
        if not self.is_open:
            await self._lock.acquire()
            self.is_open = True
        self._targets, self._num_messages = list(members()), 0
        await self._on_all(WeightLink.begin)
        if self._senders is None:
            await self._on_all(WeightLink.join)
        await self._ask_senders("begin", self._set.version)
        self._told_dtypes = self._dtypes is not None

    async def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps and sends tensors, and returns when they were sent.

        Raises:
            WeightSyncError: as `WeightSet.receive`; or senders in other processes send the set.
        """
        if self._senders is not None:
            raise WeightSyncError(
                "weight update: a bucket in the engine's process",
                expected="buckets of its senders alone",
                remedy="give the bucket to a ShardSender",
            )
        parts = messages(tensors)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            needed = await asyncio.to_thread(self._set.receive, part)
            if needed:
                await self._send(needed)

    async def _send(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        number, self._num_messages = self._num_messages, self._num_messages + 1
        await self._on_all(lambda link: link.send(tensors, number))

    async def end(self) -> None:
        """Takes the set into use; sampling waits for `go_on`.

        Raises:
            WeightSyncError: the set is incomplete, or a sender is gone. Call `give_up` then.
        """
        replies = await self._ask_senders("take", self._set.version)
        parts = {name: value for reply in replies for name, value in reply.checksums.items()}
        if len(parts) != sum(len(reply.checksums) for reply in replies):
            raise WeightSyncError("weight update: tensors of two senders", expected="each tensor once")
        held = await asyncio.to_thread(self._set.take, parts)
        await self._ask_senders("hold", held[0])
        await self._on_all(lambda link: link.end(held[0]))
        self.held, self._senders_hold, self._senders_checksums = held, self._senders is not None, parts
        self._close()

    async def go_on(self, members: Sequence[Member]) -> None:
        """Has servers sample again after `end`."""
        errors = await asyncio.gather(*(asyncio.to_thread(attempt, WeightLink.go_on, m.link) for m in members))
        self._failed += [(member, error) for member, error in zip(members, errors, strict=True) if error is not None]

    async def give_up(self) -> None:
        """Instead of `end`: brings servers back to what they held before. All of them have failed where there was
        nothing before.

        Raises:
            WeightSyncError: a sender is gone, and all servers have failed.
        """
        nothing = WeightSyncError("weight update: broken off, and there was none before it")
        try:
            if self.held is None:
                self._drop({member.name: nothing for member in self._targets})
            else:
                await self._send_held()
        except WeightSyncError as error:
            self._drop({member.name: error for member in self._targets})
            raise
        finally:
            self._close()

    async def bring_up(self, member: Member) -> None:
        """Has a server that comes late hold what it should, where anything was sent yet.

        Raises:
            WeightSyncError: a step failed, or it then does not hold what was sent.
        """
        async with self._lock:
            if self.held is None:
                return
            self._targets = [member]
            try:
                await self._send_held()
            finally:
                failed, self._targets = self.failed(), []
            error = failed[0][1] if failed else await self.check(member)
            if error is not None:
                raise error

    async def _send_held(self) -> None:
        """A whole update of the targets to what they should hold, and sampling."""
        assert self.held is not None
        version, tensors = self.held
        if self._senders_hold:
            await self._on_all(WeightLink.begin)
            await self._ask_senders("send", version)
        else:
            await self._on_all(partial(begin_and_send, tensors=tensors))
        await self._on_all(lambda link: link.end(version))
        await self._on_all(WeightLink.go_on)

    async def dtypes(self, member: Callable[[], Awaitable[Member]]) -> Mapping[str, str]:
        """Names of dtypes by checkpoint name, as servers hold tensors; a `member` is asked the first time."""
        if self._dtypes is None:
            self._dtypes = await self._ask(await member(), held_dtypes)
        return self._dtypes

    def sent(self, checksums: Mapping[str, int]) -> None:
        """Checksums of the set that was taken into use last, beside those that its senders computed.

        Raises:
            WeightSyncError: no update was taken, or a sender computed none of a tensor that it sent.
        """
        if self.held is None:
            raise WeightSyncError("weight update: none was taken", remedy="call begin_update first")
        sent = self._senders_checksums | dict(checksums)
        known = {name: value for name, value in sent.items() if value is not None}
        if unknown := sorted(sent.keys() - known.keys()):
            raise WeightSyncError(
                "weight update: tensors without a checksum of their sender",
                seen=f"{len(unknown)} of {len(sent)}, the first is {unknown[0]!r}",
                expected="a checksum of every tensor that was sent",
                remedy="let the trainer verify the versions that the engine verifies",
            )
        self._sent = self.held[0], known

    async def check(self, member: Member) -> WeightSyncError | None:
        """What of the set in use a server does not hold; None also where checksums of it are not known."""
        if self._sent is None or self.held is None or self._sent[0] != self.held[0]:
            return None
        try:
            return mismatch(member.name, self._sent[1], await self._ask(member, held_checksums))
        except WeightSyncError as error:
            return error

    async def _ask[T](self, member: Member, question: Callable[..., T]) -> T:
        client, facts = member.client, member.facts
        if client is None or facts is None:
            raise WeightSyncError(f"server {member.name!r} was lost meanwhile")
        model = ServedModel(self._shapes, facts.num_ranks, self._tied)
        return await asyncio.to_thread(question, client.endpoint, model, timeout_seconds=self._seconds)

    async def _on_all(self, step: Callable[[WeightLink], None]) -> None:
        """One step on every server that is still in the update, side by side; those that fail are out of it."""
        links = [member.link for member in self._targets]
        errors = await asyncio.gather(*(asyncio.to_thread(attempt, step, link) for link in links))
        self._drop({member.name: e for member, e in zip(self._targets, errors, strict=True) if e is not None})

    async def _ask_senders(self, do: Literal["begin", "take", "hold", "send"], version: int) -> list[Reply]:
        """What senders do for the servers that are still in the update; those that fail there are out of it.

        Raises:
            WeightSyncError: as `Senders.ask`.
        """
        if self._senders is None:
            return []
        targets = tuple(target for member in self._targets if (target := target_of(member)) is not None)
        dtypes = {} if self._told_dtypes else dict(self._dtypes or {})
        command = Command(do, version=version, targets=targets, dtypes=dtypes)
        replies = await asyncio.to_thread(self._senders.ask, command)
        names = {target.key: target.name for target in targets}
        texts = [(key, text) for reply in replies for key, text in reply.failed.items() if key in names]
        self._drop({names[key]: WeightSyncError(text) for key, text in texts})
        return replies

    def _drop(self, errors: Mapping[str, WeightSyncError]) -> None:
        """Takes servers out of the update."""
        self._failed += [(member, errors[member.name]) for member in self._targets if member.name in errors]
        self._targets = [member for member in self._targets if member.name not in errors]

    def _close(self) -> None:
        self.is_open, self._targets = False, []
        self._lock.release()


def begin_and_send(link: WeightLink, tensors: Mapping[str, Tensor]) -> None:
    """An update of one server, but for its end.

    Raises:
        WeightSyncError: a step failed.
    """
    link.begin()
    link.join()
    for number, message in enumerate(messages(tensors.items())):
        link.send(message, number)


def target_of(member: Member) -> Target | None:
    """The server as senders reach it; None where it was lost meanwhile."""
    client, link = member.client, member.link
    return None if client is None or link is None else Target(link.key, member.name, client.endpoint, link.options)
