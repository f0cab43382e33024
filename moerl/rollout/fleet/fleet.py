"""Servers that work together: who gets a request, who is watched, lost and replaced. Runs in the engine's event loop.

A server is lost after four failed requests in a row without an answer in between, after four failed probes of one token
(it is probed once a request has failed, and when it has been silent for a while), when it does not know our key, has
another version than it should, or breaks off a weight update. Dead, hanging or replaced by somebody else makes no
difference: other servers are asked for what it worked on, its launcher makes another server, that one gets the current
weights, and only then requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from moerl.contract.fields import Lineage
from moerl.errors import EngineError, MoerlError, WeightSyncError
from moerl.rollout.fleet.backend import Connect, KeyRefusedError, ServerLauncher, TransportError
from moerl.rollout.fleet.backoff import NUM_ATTEMPTS, backoff
from moerl.rollout.fleet.dispatch import Homes, choose_server
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.fleet.replica import Replica, StaleServerError, State

MAX_LOSSES = 3
"""Servers that one place gets for lost ones, without an answer in between, before it is given up."""


class Fleet:
    """The servers of one engine.

    Args:
        connect: of their backend.
        bring_up: brings a server that was just connected to hold the current weights; raises if that fails.
    """

    def __init__(
        self,
        launchers: Sequence[ServerLauncher],
        connect: Connect,
        options: EngineOptions,
        bring_up: Callable[[Replica], Coroutine[Any, Any, None]],
    ) -> None:
        self._connect, self._options, self._bring_up = connect, options, bring_up
        self.replicas = [Replica(f"{options.engine_id}-{i}", launcher) for i, launcher in enumerate(launchers)]
        self._admits, self._samples = asyncio.Event(), asyncio.Event()
        self._admits.set()
        self._samples.set()
        self._changed = asyncio.Event()
        self._waiting: deque[tuple[Lineage, Homes, asyncio.Future[Replica]]] = deque()
        self._work: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None
        self._is_closed = False

    @property
    def max_request_tokens(self) -> int:
        """Prompt and new tokens that every server has room for."""
        return min(replica.max_request_tokens for replica in self.replicas if replica.max_request_tokens)

    @property
    def current(self) -> list[Replica]:
        """Servers that hold the current weights."""
        return [replica for replica in self.replicas if replica.is_current]

    # --- servers -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Gets the first server from every launcher, side by side.

        Raises:
            EngineError: there is none, or it is not what is needed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for replica in self.replicas:
                    tasks.create_task(self._take(replica))
            for replica in self.replicas:
                self._change(replica, State.HEALTHY)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        self._start(self._watch())

    async def close(self) -> None:
        """Leaves the servers; those of our own are stopped."""
        self._is_closed = True
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*(self._leave(replica) for replica in self.replicas))

    async def _leave(self, replica: Replica) -> None:
        try:
            await replica.disconnect()
        finally:
            await asyncio.to_thread(replica.launcher.close)

    async def require_any(self) -> Replica:
        """Waits until a server holds the current weights; returns one.

        Raises:
            MoerlError: all are given up; it is the error of the last one.
        """
        while not (current := self.current):
            self._raise_if_dead()
            self._changed.clear()
            await self._changed.wait()
        return current[0]

    async def _take(self, replica: Replica) -> None:
        """Gets another server for a place without one, and has it hold the current weights."""
        endpoint = await asyncio.to_thread(replica.launcher.open)
        replica.connect(await self._connect(replica.name, endpoint))
        self._change(replica, State.STALE)
        await self._bring_up(replica)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def admit(self, lineage: Lineage, homes: Homes) -> Replica:
        """Waits for a server with room; `release` it afterwards.

        Args:
            lineage: of the request.
            homes: of its stream.

        Raises:
            MoerlError: all servers are given up; it is the error of the last one.
        """
        self._raise_if_dead()
        place: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append((lineage, homes, place))
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(place.result())
            raise

    def release(self, replica: Replica) -> None:
        """Gives back the room of a request that `admit` let in."""
        replica.load -= 1
        self._changed.set()
        self._hand_out()

    def answered(self, replica: Replica) -> None:
        """Records an answer of the server: failures before it are forgotten."""
        replica.heard()
        self._hand_out()

    def failed(self, replica: Replica, error: EngineError, asked_at: float) -> None:
        """Records that a request asked at `asked_at` (monotonic) got no answer; suspects the server, or loses it."""
        if not replica.is_current:
            return
        if replica.strike(asked_at) >= NUM_ATTEMPTS:
            self.lose(replica, error)
        else:
            self._suspect(replica, error)

    def shut(self) -> None:
        """Lets no new requests in, until `reopen`."""
        self._admits.clear()

    def pause(self) -> None:
        """Marks sampling as paused until `reopen`: servers sample nothing, and silence means nothing."""
        self._samples.clear()

    def reopen(self) -> None:
        self._admits.set()
        self._samples.set()
        now = time.monotonic()
        for replica in self.replicas:
            replica.heard_at = now
        self._hand_out()

    async def require_idle(self) -> None:
        """Waits until no request is under way."""
        while any(replica.load for replica in self.replicas):
            self._changed.clear()
            await self._changed.wait()

    def _hand_out(self) -> None:
        """Gives places to those who wait for them, first come, first served."""
        while self._waiting and self._admits.is_set():
            lineage, homes, place = self._waiting[0]
            if not place.done():
                loads = {replica.name: replica.load for replica in self.replicas if replica.state is State.HEALTHY}
                name = choose_server(loads, homes.find(lineage), self._options.max_running)
                if name is None:
                    return
                replica = next(replica for replica in self.replicas if replica.name == name)
                if replica.load == 0:
                    replica.heard_at = time.monotonic()
                replica.load += 1
                homes.chose(lineage, name)
                place.set_result(replica)
            self._waiting.popleft()

    # --- failures ----------------------------------------------------------------------------------------------------

    def lose(self, replica: Replica, error: MoerlError) -> None:
        """Gives up the present server, and has it replaced."""
        if replica.is_current:
            self._change(replica, State.RESTARTING)
            self._start(self._replace(replica, error))

    def mark_stale(self, replica: Replica, error: MoerlError) -> None:
        """Removes a server that holds other weights from rotation, and sends it everything again."""
        if replica.is_current:
            self._options.notify(f"WARNING: server {replica.name!r} gets all weights again: {error}")
            replica.give_up_asks()
            self._change(replica, State.STALE)
            self._start(self._bring_back(replica))

    async def check_versions(self, version: int) -> None:
        """Replaces servers that hold other weights: somebody else has restarted or updated them. Called before the
        requests of a `generate` call."""
        await asyncio.gather(*(self._compare(replica, version) for replica in self.current))

    async def _compare(self, replica: Replica, version: int) -> None:
        assert replica.server is not None
        try:
            seen = await replica.server.policy_version()
        except KeyRefusedError as error:
            self.lose(replica, error)
        except EngineError as error:
            self._suspect(replica, error)
        else:
            if seen != version:
                self.lose(replica, stale_server(replica, seen, version))

    async def _bring_back(self, replica: Replica) -> None:
        try:
            await self._bring_up(replica)
        except WeightSyncError as error:
            await self._replace(replica, error)
        else:
            self._go_on_with(replica)

    async def _replace(self, replica: Replica, error: MoerlError) -> None:
        """Replaces the server of a place until one holds the current weights, or the place is given up."""
        while replica.losses < MAX_LOSSES:
            self._options.notify(f"WARNING: server {replica.name!r} is lost, taking another: {error}")
            self._change(replica, State.RESTARTING)
            await replica.disconnect()
            await backoff(replica.losses)
            replica.losses += 1
            try:
                await self._take(replica)
            except (EngineError, WeightSyncError) as again:
                error = again
            else:
                self._go_on_with(replica)
                return
        await replica.disconnect()
        await asyncio.to_thread(replica.launcher.close)
        replica.error = error
        self._options.notify(f"WARNING: server {replica.name!r} is given up: {error}")
        self._change(replica, State.DEAD)

    def _go_on_with(self, replica: Replica) -> None:
        self._change(replica, State.HEALTHY)
        self._options.notify(f"server {replica.name!r}: going on")

    def _suspect(self, replica: Replica, error: EngineError) -> None:
        if replica.state is State.HEALTHY:
            replica.error = error
            self._change(replica, State.SUSPECT)
            self._start(self._probe(replica))

    async def _probe(self, replica: Replica) -> None:
        """Probes a suspected server until it answers, four times at most; then loses it."""
        for attempt in range(NUM_ATTEMPTS):
            if attempt:
                await backoff(attempt - 1)
            await self._samples.wait()
            if replica.state is not State.SUSPECT or replica.server is None:
                return
            try:
                await replica.server.probe()
            except EngineError as error:
                if self._samples.is_set():  # while sampling is paused nobody answers
                    replica.error = error
                continue
            replica.heard_at = time.monotonic()
            if replica.state is State.SUSPECT:
                self._change(replica, State.HEALTHY)
            return
        if replica.state is State.SUSPECT:
            assert replica.error is not None
            self.lose(replica, replica.error)

    async def _watch(self) -> None:
        """Suspects servers that have work and say nothing."""
        while True:
            await asyncio.sleep(self._options.probe_seconds / 4)
            silent_since = time.monotonic() - self._options.probe_seconds
            for replica in self.replicas:
                if self._samples.is_set() and replica.load and replica.heard_at < silent_since:
                    replica.heard_at = time.monotonic()
                    self._suspect(replica, _silent(replica, self._options.probe_seconds))

    # --- state -------------------------------------------------------------------------------------------------------

    def _change(self, replica: Replica, state: State) -> None:
        replica.state = state
        self._changed.set()
        self._turn_away()
        self._hand_out()

    def _end_of_all(self) -> BaseException | None:
        """Returns the error for which no server will ever be had again; None if one may."""
        if self._crash is None and all(replica.state is State.DEAD for replica in self.replicas):
            return self.replicas[-1].error
        return self._crash

    def _turn_away(self) -> None:
        error = self._end_of_all()
        while error is not None and self._waiting:
            _, _, place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)

    def _raise_if_dead(self) -> None:
        error = self._end_of_all()
        if error is not None:
            raise error

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Forgets a task that ended. If it raised, all that wait for a server get its error, now and later: nothing may
        wait for a server that nobody looks after."""
        self._work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._changed.set()
            self._turn_away()


def first_error(error: BaseException) -> BaseException:
    """Returns the first error of a task group, or `error` itself if it is no group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def stale_server(replica: Replica, seen: int, expected: int) -> StaleServerError:
    return StaleServerError(
        f"server {replica.name!r}: other weights",
        seen=f"policy version {seen}",
        expected=expected,
        remedy="let nobody else update or restart this server",
    )


def _silent(replica: Replica, seconds: float) -> TransportError:
    return TransportError(
        f"server {replica.name!r} works on {replica.load} requests and says nothing",
        seen=f"no answer for {seconds} s",
        expected="an answer, or a token for a probe",
        remedy="look at its log",
    )
