"""Ranks as the senders of an engine's servers, and commands to ranks from more than one thread of the controller.

    main thread             the loop's commands, one after the other
    threads of the engine   `KeepWeights` and `Resend`: at the end of an update, for a server that comes late, after
                            an update that was given up

A thread waits until the other's command has ended. No thread of the engine does so during `Publish`: then the engine's
update is open, and no other thread may ask its senders for anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from moerl.contract.commands import AnyCommand, KeepWeights, Reply, Resend, Target
from moerl.contract.ports import PolicyEngine
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import MoerlError, WeightSyncError, undoing
from moerl.ranks.away import GRACE_SECONDS
from moerl.ranks.port import Ranks
from moerl.rollout.fleet.sender import Part


class RanksInTurn:
    """`Ranks` that several threads may ask: one command at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._turn = threading.RLock()
        self._is_told = False
        self._lost: MoerlError | None = None

    @property
    def peak_rss_bytes(self) -> Sequence[int]:
        return self._ranks.peak_rss_bytes

    def adopt(self, engine: PolicyEngine | None) -> bool:
        return self._ranks.adopt(engine)

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        with self._turn:
            self._end_told()
            self._check()
            return self._ranks.ask(command, frames)

    def tell(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> None:
        """Does the same as `Ranks.tell`. Other threads wait until this thread has called `replies`."""
        self._turn.acquire()
        with undoing(self._turn.release):
            self._end_told()
            self._check()
            self._ranks.tell(command, frames)
            self._is_told = True

    def replies(self) -> list[Reply]:
        self._is_told = False
        try:
            return self._ranks.replies()
        finally:
            self._turn.release()

    def ask_aside(self, command: AnyCommand) -> list[Reply]:
        """Does the same as `ask`, from a thread other than the main one. The main thread's next command raises the
        error if ranks are lost.

        Raises:
            WeightSyncError: ranks are lost, or one of them failed.
        """
        with self._turn:
            try:
                self._check()
                return self._ranks.ask(command)
            except WeightSyncError:
                raise
            except MoerlError as error:
                self._lost = error
                raise WeightSyncError(f"weight update: {error.what}", seen=error.seen, remedy=error.remedy) from error

    def close(self) -> None:
        """Does the same as `Ranks.close`; before, waits `GRACE_SECONDS` at most for the command of another thread."""
        has_turn = self._turn.acquire(timeout=GRACE_SECONDS)
        try:
            self._ranks.close()
        finally:
            if has_turn:
                self._turn.release()

    def _end_told(self) -> None:
        """Waits for the replies to a command that this thread sent by `tell`."""
        if self._is_told:
            self.replies()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost


class RankSenders:
    """`AllSenders` that are trainer ranks. The controller sends `Publish`, with `targets`, after the engine's update
    began, and gives the replies to `published` before the update ends.

    Attributes:
        targets: the servers that the engine's open update is for.
    """

    def __init__(self, ranks: RanksInTurn) -> None:
        self._ranks = ranks
        self.targets: tuple[Target, ...] = ()
        self._parts: list[Part] = []

    def published(self, replies: Sequence[Reply]) -> None:
        """Stores the replies of all ranks to `Publish`, for `close_set`."""
        self._parts = _parts(replies)

    async def begin(self, update: WeightUpdate, targets: Sequence[Target]) -> None:
        self.targets, self._parts = tuple(targets), []

    async def close_set(self, version: int) -> Sequence[Part]:
        return self._parts

    async def keep(self, version: int) -> None:
        await asyncio.to_thread(self._ranks.ask_aside, KeepWeights(version))

    async def send(self, version: int, targets: Sequence[Target]) -> Sequence[Part]:
        return _parts(await asyncio.to_thread(self._ranks.ask_aside, Resend(version, tuple(targets))))

    async def close(self) -> None:
        """Does nothing: ranks leave the servers when they end."""


def _parts(replies: Sequence[Reply]) -> list[Part]:
    return [Part(reply.checksums.keys(), reply.failed) for reply in replies]
