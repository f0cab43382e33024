"""One bucket of weights from one sender to several receivers, in about the time that one receiver takes.

    sender ──piece 3──> receiver A ──piece 2──> receiver B ──piece 1──> receiver C

Runs in the sender's process. A receiver that fails is left out: the others form a new group, and the bucket is sent
again. Nobody waits longer for a piece than it may take, a quarter of a bucket's time limit, and once something has
failed the sender waits little longer than that for the rest. So a receiver that dies or hangs costs the others one time
limit at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.processes.loop_thread import in_thread
from moerl.rollout.sglang.invitation import Invitation
from moerl.rollout.sglang.sender_group import LOST_RANK, GroupOptions, SenderGroup, flat_view, flattened

_REST_SHARE = 1.25
"""Time limits of a piece that the sender waits for other calls once one has failed; receivers give up within one."""

_NO_GROUP = "Failed to initialize custom process group"
"""In the answer of a receiver that could not join; the cause may be another one that did not come."""


class Receiver(Protocol):
    """A server as the sender reaches it. Methods raise `WeightSyncError`."""

    name: str
    """Name for messages."""
    num_ranks: int
    """Ranks that it has in a group."""

    async def join(self, invitation: Invitation) -> None:
        """Joins a group, and leaves the one before."""

    async def take(self, bucket: Sequence[tuple[str, Tensor]], number: int) -> None:
        """Receives a bucket in the group that it joined last, and loads it. number: of the bucket, for messages."""


class Broadcast:
    """One sender's way to its receivers; one call at a time. Their group is formed anew when they change."""

    def __init__(self, options: GroupOptions) -> None:
        self._options = options
        self._group: SenderGroup | None = None
        self._members: list[str] = []

    async def send(
        self, bucket: Sequence[tuple[str, Tensor]], receivers: Mapping[str, Receiver], number: int
    ) -> dict[str, WeightSyncError]:
        """Sends tensors under their checkpoint names.

        Args:
            receivers: by key, in their order in the chain; one that takes the place of another has its own key.
            number: of the bucket in its update, for messages.

        Returns:
            By key, the receivers that failed and why. All others have loaded the bucket.
        """
        failed: dict[str, WeightSyncError] = {}
        # A gathered bucket lies so already; a copy takes long, and others may wait for this event loop.
        if (flat := flat_view(bucket)) is None:
            flat = await asyncio.to_thread(flattened, bucket)
        left, is_sent = dict(receivers), False
        while left and not is_sent:
            problems = await self._form(left, number)
            if (group := self._group) is not None:
                takes = [receiver.take(bucket, number) for receiver in left.values()]
                outcomes = await self._side_by_side([group.push(flat), *takes])
                out, is_sent = to_blame(outcomes, group.owner)
                problems = self._problems(out, left, outcomes, f"bucket {number}")
                if not is_sent:
                    self.leave()
            failed |= problems
            left = {key: receiver for key, receiver in left.items() if key not in problems}
        return failed

    def leave(self) -> None:
        """Gives the group up. Receivers leave it when a channel tells them, or join another one."""
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.leave()

    async def _form(self, receivers: Mapping[str, Receiver], number: int) -> dict[str, WeightSyncError]:
        """Forms one group of these receivers; returns those that prevent it."""
        if list(receivers) == self._members:
            return {}
        self.leave()
        group = SenderGroup(self._options, [receiver.num_ranks for receiver in receivers.values()])
        joins = [r.join(invitation) for r, invitation in zip(receivers.values(), group.invitations, strict=True)]
        outcomes = await self._side_by_side([in_thread(group.form), *joins])
        if all(outcome is None for outcome in outcomes):
            self._group, self._members = group, list(receivers)
            return {}
        group.leave()
        # Those that came, and found no group, have waited for others.
        out = [
            i
            for i, outcome in enumerate(outcomes[1:])
            if outcome is not None and not (group.has_come(i) and _NO_GROUP in str(outcome))
        ]
        return self._problems(out or range(len(receivers)), receivers, outcomes, f"group of bucket {number}")

    async def _side_by_side(self, calls: Sequence[Awaitable[None]]) -> list[Exception | None]:
        """Runs calls side by side; returns the error of each, None for success, and `NoAnswer` for a call that did not
        end in time."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        pending, until = set(tasks), time.monotonic() + self._options.seconds
        try:
            while pending and (seconds := until - time.monotonic()) > 0:
                done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() is not None for task in done):
                    until = min(until, time.monotonic() + _REST_SHARE * self._options.piece_seconds)
        finally:
            for task in pending:
                task.cancel()
        return [NoAnswer("no answer in time") if task in pending else _error(task) for task in tasks]

    def _problems(
        self, out: Iterable[int], receivers: Mapping[str, Receiver], outcomes: Sequence[Exception | None], doing: str
    ) -> dict[str, WeightSyncError]:
        """Returns why receivers are left out, by key: their own error if they have one."""
        seconds, piece_seconds = self._options.seconds, self._options.piece_seconds
        problems = {}
        for i in out:
            key, error = list(receivers)[i], outcomes[i + 1]
            problems[key] = (
                error
                if isinstance(error, WeightSyncError)
                else WeightSyncError(
                    f"weight update: server {receivers[key].name!r}, {doing}: failed",
                    seen="another one waited for it" if error is None else f"{type(error).__name__}: {error}",
                    expected=f"success within {seconds:g} s, of a piece within {piece_seconds:g} s",
                    remedy="look at the server's log; servers of one sender must reach one another",
                )
            )
        return problems


class NoAnswer(Exception):  # noqa: N818 - an outcome, never raised
    """A call that took too long."""


def _error(task: asyncio.Future[None]) -> Exception | None:
    error = task.exception()
    assert error is None or isinstance(error, Exception)
    return error


def to_blame(outcomes: Sequence[Exception | None], owner: Callable[[int], int]) -> tuple[list[int], bool]:
    """Finds the receivers to leave out, by position, and whether all others have the bucket.

    One that dies, hangs or refuses has an error of its own, or no answer in time. Its neighbours say whom they waited
    for: that only counts if nobody has an error of their own, because a connection between two of them is broken.

    Args:
        outcomes: of the sender, then of each receiver; None for success.
        owner: returns the receiver of a rank, -1 for the sender.
    """
    losses = {i: lost for i, outcome in enumerate(outcomes) if (lost := LOST_RANK.search(str(outcome)))}
    out = [i - 1 for i, outcome in enumerate(outcomes) if i > 0 and outcome is not None and i not in losses]
    if not losses and outcomes[0] is None:
        return out, True
    if out or not losses:
        return out or list(range(len(outcomes) - 1)), False
    reporter = min(losses, key=lambda i: (losses[i]["state"] != "late", i))
    named = owner(int(losses[reporter]["rank"]))
    if named < 0 or outcomes[named + 1] is None:  # whoever has the whole bucket is not late
        named = reporter - 1
    return [max(named, 0)], False
