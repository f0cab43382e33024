"""Servers as the trainer's engine: asked, watched, replaced when they fail, never used with other weights.

Runs inside the process that asks for rollouts: `generate` is an ordinary iterator, calls to servers are made by an
event loop in a thread of their own. Each rollout yields one record at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from moerl.contract.commands import Target
from moerl.contract.ports import EngineInfo, ReportedLayers, RolloutRecord, RolloutRequest, SamplingCosts
from moerl.contract.weight_update import WeightUpdate, check_update, require_open
from moerl.errors import EngineError, WeightSyncError, note_later, undoing
from moerl.processes.loop_thread import LoopThread
from moerl.rollout.fleet.backend import Connect, ModelFacts, ServerLauncher, WeightChannel
from moerl.rollout.fleet.fleet import Fleet, first_error, stale_server
from moerl.rollout.fleet.options import EngineOptions, Interrupt
from moerl.rollout.fleet.replica import Replica, State
from moerl.rollout.fleet.request_loop import Call, RequestLoop, Rollout
from moerl.rollout.fleet.sender import AllSenders, Sender, WeightSet
from moerl.rollout.fleet.updates import Updates, require_server
from moerl.rollout.requests import check_requests
from moerl.rollout.stream import CallStream, flattened, is_left_out


class FleetEngine:
    """A `PolicyEngine` and `CheckedSink` on one or more servers.

    Attributes:
        unfinished: rollout ids of the latest `generate` call that yielded no record: aborted before their first token,
            or given up. Ask for them again.
        costs: of weight updates and prefix caches, summed up.
    """

    def __init__(
        self,
        launchers: Sequence[ServerLauncher],
        connect: Connect,
        model: ModelFacts,
        options: EngineOptions,
        version: int,
    ) -> None:
        """Gets a server from every launcher, and connects to it.

        Args:
            connect: of the servers' backend.
            version: policy version of the weights that servers start with; -1 if they must wait for an update.

        Raises:
            EngineError: there is none, or one is not what is needed; the message names it.
        """
        self._model, self._options = model, options
        self._calls: dict[int, Call] = {}
        self._stalled_at = 0.0
        self._will_check = self._awaits_check = self._sleeps = False
        self.unfinished: list[str] = []
        self.costs = SamplingCosts()
        self._loop = LoopThread(f"{options.engine_id}-http")
        # A place that waits for its server must not keep others from their updates.
        workers = ThreadPoolExecutor(4 + 4 * len(launchers), f"{options.engine_id}-work")
        self._loop.call(lambda: asyncio.get_running_loop().set_default_executor(workers))
        weight_set = WeightSet(options.tied, keeps_copy=options.keeps_copy)
        sender = Sender(weight_set, self._open_channel, options.bucket_bytes, together=True)
        self._updates = Updates(options.tied, sender)
        self._fleet = Fleet(launchers, connect, options, self._bring_up)
        # Calls of one update come one after the other, whatever threads they come from.
        self._turn = asyncio.Lock()
        self._requests = RequestLoop(self._fleet, model.spec, self.costs, version)
        with undoing(self.close):  # an interrupt, too, leaves no server behind
            self._wait(self._fleet.open())

    @property
    def states(self) -> dict[str, State]:
        """States of all servers, by name."""
        return {replica.name: replica.state for replica in self._fleet.replicas}

    def handshake(self) -> EngineInfo:
        """Returns what the engine is. Waits for a server if all are lost.

        Its version is -1 before the first update, unless servers started with weights of a version.

        Raises:
            EngineError: all servers are given up.
        """
        self._wait(self._fleet.require_any())
        version, layers = self._requests.version, self._model.moe_layers
        return EngineInfo(self._options.engine_id, self._model.spec, version, ReportedLayers.MOE, layers)

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        """Yields one record per request, in the order in which they finish. Calls may overlap, from any threads; one
        begins to ask when its first record is asked for.

        Raises:
            EngineError: at once, if a request is refused, no weights were sent yet or servers sleep; at a later record,
                if a server refused one, or all servers were given up.
        """
        return flattened(self.stream(), requests)

    def stream(self) -> CallStream:
        """Returns a stream of requests; streams may overlap. Servers are asked once it is iterated."""
        call, left = Call(), dict[str, None]()

        def put(requests: Sequence[RolloutRequest] | None) -> None:
            if requests:
                self._check(requests)
                left.update(dict.fromkeys(request.lineage.rollout_id for request in requests))
            self._loop.call(call.add, None if requests is None else [Rollout(request) for request in requests])

        return CallStream(put, self._serve(call, left))

    def abort(self, rollout_ids: Collection[str] | None = None) -> None:
        """Finishes the named rollouts of all `generate` calls (all when None).

        Those with a token yield what they have, with reason `abort`; the others are listed in `unfinished`. From any
        thread; without a call it does nothing. A server on which the call fails counts as failed.
        """
        for call in list(self._calls.values()):
            self._wait(self._requests.abort(call, rollout_ids))

    def sleep(self) -> None:
        """Has servers give the memory of weights and prefix caches to the trainer. The next update of all weights takes
        it back; until then nothing is sampled. A server that fails is replaced, and the other one is awake.

        Raises:
            EngineError: rollouts are under way.
        """
        if self._calls:
            raise EngineError(
                f"engine {self._options.engine_id!r} cannot sleep",
                seen=f"{len(self._calls)} calls under way",
                expected="none",
                remedy="take all records of a call, or close it",
            )
        self._wait(self._sleep())

    def begin_update(self, update: WeightUpdate) -> None:
        """Stops sampling as `EngineOptions.interrupt` says and starts an update; one that was never ended is forgotten.

        Servers that fail are replaced meanwhile.

        Raises:
            WeightSyncError: its list is not for the tensors of the served model; servers hold what they held before.
        """
        self._wait(self._begin(update))

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sends one bucket of tensors under their checkpoint names.

        Raises:
            WeightSyncError: no update is open; the update does not list a tensor, or with another shape, or it came
                before; or trainer ranks send the set.
        """
        self._wait(self._receive(tensors))

    def end_update(self) -> None:
        """Takes the set into use. Servers that failed get it when they are replaced, before they get requests.

        If `held_dtypes` was called before, sampling waits for `verify`: nothing is sampled with weights that are not
        those that were sent.

        Raises:
            WeightSyncError: the set is incomplete: servers hold what they held before.
        """
        self._wait(self._end())

    def abandon_update(self) -> None:
        """Gives up the open update: servers get back what they held before, and sampling goes on. After `end_update`,
        in place of `verify`: sampling goes on. Does nothing on a closed engine."""
        if not self._loop.is_closed:
            self._wait(self._abandon())

    def held_dtypes(self) -> Mapping[str, str]:
        """Returns names of dtypes by checkpoint name, as servers hold tensors. Waits for a server the first time."""
        return self._wait(self._held_dtypes())

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compares the weights of servers with checksums of the sent ones. Servers that hold other weights get
        everything again, and requests only once they hold what was sent.

        Raises:
            WeightSyncError: no update was taken into use, or a tensor was sent that has no checksum.
        """
        self._wait(self._verify(sent))

    def send_by(self, senders: AllSenders) -> None:
        """Has these send every set of weights from the next update on; this process then sends nothing and keeps no
        tensors. Call it before the first update of the trainer."""
        self._updates.send_by(senders)

    def close(self) -> None:
        """Gives up what is under way and leaves the servers; those that launchers have started are stopped."""
        self._loop.close(self._leave)

    async def _leave(self) -> None:
        await self._updates.close()
        await self._fleet.close()

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the event loop and returns its result. Raises EngineError if the engine is closed."""
        try:
            return self._loop.start(work).result()
        except CancelledError:
            raise self._closed() from None

    def _closed(self) -> EngineError:
        return EngineError(f"engine {self._options.engine_id!r} was closed")

    def _check(self, requests: Sequence[RolloutRequest]) -> None:
        if self._sleeps or self._requests.version < 0:
            raise EngineError(
                f"engine {self._options.engine_id!r}: " + ("its servers sleep" if self._sleeps else "no weights yet"),
                seen="policy version -1",
                expected="a weight update before the next request",
                remedy="publish weights first",
            )
        # A server needs room for one token more than the model does.
        check_requests(requests, self._model.spec, self._fleet.max_request_tokens - 1)

    def _serve(self, call: Call, left: dict[str, None]) -> Generator[list[RolloutRecord]]:
        """Yields the records of a stream. left: ids of its rollouts without a record."""
        self._calls[id(call)] = call  # before it asks for anything: an update must know whom to cut short
        work = self._loop.start(self._requests.serve(call))
        work.add_done_callback(lambda done: call.outcomes.put(None))
        try:
            while (records := call.outcomes.get()) is not None:
                for record in records:
                    if not is_left_out(record):
                        del left[record.rollout_id]
                yield records
            if work.cancelled():
                raise self._closed()
            error = work.exception()
            if error is not None:
                raise first_error(error)
        finally:
            work.cancel()
            self.unfinished = list(left)
            del self._calls[id(call)]

    # --- weights -----------------------------------------------------------------------------------------------------

    def _open_channel(self, target: Target) -> WeightChannel:
        """Opens a channel to a server. Raises WeightSyncError if the server was lost meanwhile."""
        for replica in self._fleet.replicas:
            if replica.key == target.key:
                return require_server(replica).open_channel()
        raise WeightSyncError(f"weight update: server {target.name!r} was lost meanwhile")

    async def _bring_up(self, replica: Replica) -> None:
        """Has a server that was just connected hold the current weights."""
        await self._updates.bring_up(replica)
        seen, expected = require_server(replica).first_version, self._requests.version
        if self._updates.held is None and expected not in (-1, seen):
            raise stale_server(replica, seen, expected)

    async def _sleep(self) -> None:
        async with self._turn:
            self._sleeps = True
            self._fleet.shut()
            await self._fleet.require_idle()
            self._fleet.pause()
            with self._losing():
                await self._updates.on_each(lambda server: server.sleep(), self._fleet.current)

    async def _begin(self, update: WeightUpdate) -> None:
        async with self._turn:
            if self._awaits_check:
                await self._resume()
            check_update(update, self._options.shapes, self._options.tied)
            if self._updates.update is None:
                await self._interrupt()
            with self._losing():
                await self._updates.begin(update, lambda: self._fleet.current)

    async def _interrupt(self) -> None:
        """Lets no new requests in, ends those under way as `EngineOptions.interrupt` says, and marks sampling as
        paused."""
        self._fleet.shut()
        rollouts = [rollout for call in list(self._calls.values()) for rollout in call.rollouts.values()]
        self.costs.interrupted += sum(rollout.replica is not None for rollout in rollouts)
        try:
            if self._options.interrupt is Interrupt.DRAIN:
                await self._fleet.require_idle()
            elif self._options.interrupt is Interrupt.ABORT_RESUME:
                await self._requests.cut_all_short(rollouts)
        except BaseException:  # cancelled, or all servers are lost: nothing may wait for an update that never begins
            self._fleet.reopen()
            raise
        self._fleet.pause()
        self._stalled_at = time.perf_counter()

    async def _receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        async with self._turn:
            require_open(self._updates.update)
            with self._losing():
                await self._updates.receive(tensors)

    async def _end(self) -> None:
        async with self._turn:
            require_open(self._updates.update)
            try:
                with self._losing():
                    await self._updates.end()
            except WeightSyncError as first:
                try:
                    await self._give_up()
                except WeightSyncError as later:
                    note_later(first, later)
                raise
            assert self._updates.held is not None
            self._requests.version = self._updates.held
            self._awaits_check, self._will_check = self._will_check, False
            if not self._awaits_check:
                await self._resume()

    async def _abandon(self) -> None:
        async with self._turn:
            self._will_check = False
            if self._updates.update is not None:
                await self._give_up()
            elif self._awaits_check:
                await self._resume()

    async def _held_dtypes(self) -> Mapping[str, str]:
        self._will_check = True
        return await self._updates.dtypes(self._fleet.require_any)

    async def _verify(self, sent: Mapping[str, int]) -> None:
        async with self._turn:
            self._updates.sent(sent)
            replicas = self._fleet.current
            for replica, error in zip(replicas, await asyncio.gather(*map(self._updates.check, replicas)), strict=True):
                if error is not None:
                    self._fleet.mark_stale(replica, error)
            if self._awaits_check:
                await self._resume()

    async def _resume(self) -> None:
        self._awaits_check = False
        try:
            with self._losing():
                await self._updates.on_each(lambda server: server.resume(), self._fleet.current)
        finally:
            self._reopen()

    async def _give_up(self) -> None:
        self._will_check = False
        try:
            await self._updates.give_up()
        finally:
            for replica, error in self._updates.failed():
                if self._requests.version >= 0:  # else nobody asks it before the next update
                    self._fleet.lose(replica, error)
            self._reopen()

    def _reopen(self) -> None:
        self._sleeps = False
        self.costs.stalled_seconds += time.perf_counter() - self._stalled_at
        self._fleet.reopen()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Replaces the servers on which a step of an update failed, also if the step raises."""
        try:
            yield
        finally:
            for replica, error in self._updates.failed():
                self._fleet.lose(replica, error)
