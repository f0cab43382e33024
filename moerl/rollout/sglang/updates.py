"""Weight updates of an engine's servers: what is sent, what is kept for those that come later. Runs in its event loop.

Buckets go to all servers side by side as they arrive, and a copy of the set is kept in this process: a server that
takes the place of a lost one, or was away, gets it before it gets requests. A set that turns out not to be whole leaves
servers with a mixture; they get the set before it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.held import ServedModel, held_checksums, held_dtypes
from moerl.rollout.sglang.member import Member
from moerl.rollout.sglang.weight_set import WeightSet
from moerl.rollout.sglang.weights import WeightLink
from moerl.rollout.witness import mismatch

MESSAGE_BYTES = 256 << 20
"""Tensors are sent together until they reach this."""


class Updates:
    """The sets of weights of one engine.

    Attributes:
        held: version and tensors that servers should hold; None before the first update.
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

    def stage(self, version: int) -> None:
        """Makes room for a set; one that was never ended is forgotten. Servers go on.

        Raises:
            WeightSyncError: not a version.
        """
        self._set.begin(version)

    async def begin(self, members: Callable[[], Sequence[Member]]) -> list[tuple[Member, WeightSyncError]]:
        """Starts the update of the members that are current when it can begin. Returns those that failed."""
        if not self.is_open:
            await self._lock.acquire()
            self.is_open = True
        self._targets, self._num_messages = list(members()), 0
        return await self._on_all(WeightLink.begin)

    async def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[Member, WeightSyncError]]:
        """Keeps and sends tensors, and returns when they were sent. Returns the servers that failed.

        Raises:
            WeightSyncError: as `WeightSet.receive`.
        """
        failed: list[tuple[Member, WeightSyncError]] = []
        parts = _messages(tensors)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            needed = await asyncio.to_thread(self._set.receive, part)
            failed += await self._send(needed)
        return failed

    async def _send(self, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[Member, WeightSyncError]]:
        number, self._num_messages = self._num_messages, self._num_messages + 1
        return await self._on_all(lambda link: link.send(tensors, number)) if tensors else []

    async def end(self) -> list[tuple[Member, WeightSyncError]]:
        """Takes the set into use. Returns the servers that failed.

        Raises:
            WeightSyncError: the set is not whole. Call `give_up` then.
        """
        held = await asyncio.to_thread(self._set.take)
        failed = await self._on_all(lambda link: link.end(held[0]))
        self.held = held
        self._close()
        return failed

    async def give_up(self) -> list[tuple[Member, WeightSyncError]]:
        """Instead of `end`: brings servers back to what they held before. Returns those that failed, which is all of
        them where there was nothing before."""
        held = self.held
        if held is None:
            nothing = WeightSyncError("weight update: broken off, and there was none before it")
            failed = [(member, nothing) for member in self._targets]
        else:
            failed = await self._on_all(lambda link: send_all(link, *held))
        self._close()
        return failed

    async def bring_up(self, member: Member) -> None:
        """Has a server that comes late hold what it should, where anything was sent yet.

        Raises:
            WeightSyncError: a step failed, or it then does not hold what was sent.
        """
        async with self._lock:
            held = self.held
            if held is None:
                return
            error = await _step(lambda link: send_all(link, *held), member.link) or await self.check(member)
            if error is not None:
                raise error

    async def dtypes(self, member: Callable[[], Awaitable[Member]]) -> Mapping[str, str]:
        """Names of dtypes by checkpoint name, as servers hold tensors; a `member` is asked the first time."""
        if self._dtypes is None:
            self._dtypes = await self._ask(await member(), held_dtypes)
        return self._dtypes

    def sent(self, checksums: Mapping[str, int]) -> None:
        """Checksums of the set that was taken into use last."""
        assert self.held is not None
        self._sent = self.held[0], checksums

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

    async def _on_all(self, step: Callable[[WeightLink], None]) -> list[tuple[Member, WeightSyncError]]:
        """One step on every server that is still in the update, side by side; those that fail are out of it."""
        links = [(member, member.link) for member in self._targets]
        results = await asyncio.gather(*(_step(step, link) for _, link in links))
        failed = [(member, error) for (member, _), error in zip(links, results, strict=True) if error is not None]
        self._targets = [member for (member, _), error in zip(links, results, strict=True) if error is None]
        return failed

    def _close(self) -> None:
        self.is_open, self._targets = False, []
        self._lock.release()


def send_all(link: WeightLink, version: int, tensors: Mapping[str, Tensor]) -> None:
    """A whole update of one server.

    Raises:
        WeightSyncError: a step failed.
    """
    link.begin()
    for number, bucket in enumerate(_messages(tensors.items())):
        link.send(bucket, number)
    link.end(version)


async def _step(step: Callable[[WeightLink], None], link: WeightLink | None) -> WeightSyncError | None:
    if link is None:
        return WeightSyncError("weight update: the server was lost meanwhile")
    try:
        await asyncio.to_thread(step, link)
    except WeightSyncError as error:
        return error
    except (RuntimeError, OSError, ValueError) as error:  # of torch's process groups, of a client closed meanwhile
        return WeightSyncError(f"weight update: {type(error).__name__}", seen=error, expected="a whole update")
    return None


def _messages(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors; each message but the last reaches `MESSAGE_BYTES`."""
    message: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        message.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= MESSAGE_BYTES:
            yield message
            message, size = [], 0
    if message:
        yield message
