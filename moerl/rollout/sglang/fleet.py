"""Servers that work together: who gets a request, who is watched, lost and replaced. Runs in the engine's event loop.

A server is lost when requests to it fail four times in a row without an answer in between, when four probes of one
token fail (it is probed once a request has failed, and when nothing was heard of it for a while), when it does not know
our key, holds other weights than it should, or breaks off a weight update. Dead, hanging or replaced behind our back
makes no difference: what it worked on is asked of others, its source makes another server, that one gets the current
weights, and only then requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from moerl.errors import EngineError, MoerlError, WeightSyncError
from moerl.rollout.sglang.client import ModelFacts, ServerClient
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.http import NUM_ATTEMPTS, KeyRefusedError, backoff
from moerl.rollout.sglang.member import Member, StaleServerError, State
from moerl.rollout.sglang.options import EngineOptions
from moerl.rollout.sglang.reading import TransportError
from moerl.rollout.sglang.routing import choose_server
from moerl.rollout.sglang.sources import ServerSource
from moerl.rollout.sglang.weights import LinkOptions, WeightLink

MAX_LOSSES = 3
"""Servers that one place loses in a row, without an answer in between, before it is given up."""


class Fleet:
    """The servers of one engine.

    version: policy version that servers must hold before they get requests.
    bring_up: brings a server that was just connected to hold the current weights; raises where that fails.
    """

    def __init__(
        self,
        sources: Sequence[ServerSource],
        model: ModelFacts,
        options: EngineOptions,
        bring_up: Callable[[Member], Coroutine[Any, Any, None]],
    ) -> None:
        self._model, self._options, self._bring_up = model, options, bring_up
        self.members = [Member(f"{options.engine_id}-{i}", source) for i, source in enumerate(sources)]
        self._admits, self._samples = asyncio.Event(), asyncio.Event()
        self._admits.set()
        self._samples.set()
        self._changed = asyncio.Event()
        self._waiting: deque[tuple[str, asyncio.Future[Member]]] = deque()
        self._homes: dict[str, str] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None
        self._is_closed = False

    @property
    def max_request_tokens(self) -> int:
        """Prompt and new tokens that every server has room for."""
        return min(member.facts.report.max_request_tokens for member in self.members if member.facts is not None)

    @property
    def current(self) -> list[Member]:
        """Those that hold the current weights."""
        return [member for member in self.members if member.is_current]

    # --- servers -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Takes the first server of every source, side by side.

        Raises:
            EngineError: there is none, or it is not what is needed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in self.members:
                    tasks.create_task(self._take(member))
            for member in self.members:
                self._change(member, State.HEALTHY)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        self._start(self._watch())

    async def close(self) -> None:
        """Leaves the servers; those of our own are stopped."""
        self._is_closed = True
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*(self._leave(member) for member in self.members))

    async def _leave(self, member: Member) -> None:
        link, is_current = member.link, member.is_current
        member.link = None
        try:
            if link is not None:
                await asyncio.to_thread(link.close if is_current else link.abandon)
            await member.disconnect()
        finally:
            await asyncio.to_thread(member.source.close)

    async def require_any(self) -> Member:
        """Waits until a server holds the current weights; returns one.

        Raises:
            MoerlError: all are given up; it is the error of the last one.
        """
        while not (current := self.current):
            self._raise_if_dead()
            self._changed.clear()
            await self._changed.wait()
        return current[0]

    async def _take(self, member: Member) -> None:
        """From a place without a server to one with a server that holds the current weights."""
        endpoint = await asyncio.to_thread(member.source.open)
        await self._connect(member, endpoint)
        await self._bring_up(member)

    async def _connect(self, member: Member, endpoint: Endpoint) -> None:
        options, member.strikes = self._options, 0
        member.client = ServerClient(
            endpoint,
            max_connections=options.max_running,
            timeout_seconds=options.response_seconds,
            control_seconds=options.probe_seconds,
        )
        member.facts = facts = await member.client.facts(self._model)
        if facts.dtype.removeprefix("torch.") != options.dtype:
            raise EngineError(
                "SGLang server: precision",
                seen=facts.dtype,
                expected=f"rollout.dtype = {options.dtype}",
                remedy=f"moerl serve --dtype {options.dtype}, or set rollout.dtype",
            )
        backend = "gloo" if facts.device == "cpu" else "nccl"
        link_options = LinkOptions(facts.num_ranks, backend, options.update_seconds)
        member.link = WeightLink(member.name, endpoint, link_options, torch.device("cuda"))
        self._change(member, State.STALE)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def admit(self, group_id: str) -> Member:
        """Waits for a server with room; `release` it afterwards.

        Args:
            group_id: of requests with the same prompt.

        Raises:
            MoerlError: all servers are given up; it is the error of the last one.
        """
        self._raise_if_dead()
        place: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((group_id, place))
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(place.result())
            raise

    def release(self, member: Member) -> None:
        """A request of `admit` is done with."""
        member.load -= 1
        self._changed.set()
        self._hand_out()

    def answered(self, member: Member) -> None:
        """The server gave an answer: what failed before is forgotten."""
        member.heard()
        self._hand_out()

    def failed(self, member: Member, error: EngineError, asked_at: float) -> None:
        """A request that was asked at `asked_at` (monotonic) got no answer."""
        if not member.is_current:
            return
        if member.strike(asked_at) >= NUM_ATTEMPTS:
            self.lose(member, error)
        else:
            self._suspect(member, error)

    def shut(self) -> None:
        """From now on nothing new is asked for."""
        self._admits.clear()

    def pause(self) -> None:
        """From now on servers sample nothing, and silence means nothing."""
        self._samples.clear()

    def reopen(self) -> None:
        self._admits.set()
        self._samples.set()
        now = time.monotonic()
        for member in self.members:
            member.heard_at = now
        self._hand_out()

    async def require_idle(self) -> None:
        """Waits until no request is under way."""
        while any(member.load for member in self.members):
            self._changed.clear()
            await self._changed.wait()

    def _hand_out(self) -> None:
        """Gives places to those who wait for them, first come, first served."""
        while self._waiting and self._admits.is_set():
            group_id, place = self._waiting[0]
            if not place.done():
                loads = {member.name: member.load for member in self.members if member.state is State.HEALTHY}
                name = choose_server(loads, self._homes.get(group_id), self._options.max_running)
                if name is None:
                    return
                member = next(member for member in self.members if member.name == name)
                if member.load == 0:
                    member.heard_at = time.monotonic()
                member.load += 1
                self._homes[group_id] = name
                place.set_result(member)
            self._waiting.popleft()

    # --- failures ----------------------------------------------------------------------------------------------------

    def lose(self, member: Member, error: MoerlError) -> None:
        """Gives up the present server, and has it replaced."""
        if member.is_current:
            self._change(member, State.RESTARTING)
            self._start(self._replace(member, error))

    def doubt(self, member: Member, error: MoerlError) -> None:
        """Takes a server that holds something else out of use until it holds the current weights."""
        if member.is_current:
            self._options.say(f"WARNING: SGLang server {member.name!r} gets all weights again: {error}")
            member.give_up_asks()
            self._change(member, State.STALE)
            self._start(self._bring_back(member))

    async def muster(self, version: int) -> None:
        """Before a call: loses servers that hold other weights; whoever restarted them cannot have given them those."""
        self._homes.clear()
        await asyncio.gather(*(self._compare(member, version) for member in self.current))

    async def _compare(self, member: Member, version: int) -> None:
        assert member.client is not None
        try:
            seen = await member.client.policy_version()
        except KeyRefusedError as error:
            self.lose(member, error)
        except EngineError as error:
            self._suspect(member, error)
        else:
            if seen != version:
                self.lose(member, stale_server(member, seen, version))

    async def _bring_back(self, member: Member) -> None:
        try:
            await self._bring_up(member)
        except WeightSyncError as error:
            await self._replace(member, error)
        else:
            self._go_on_with(member)

    async def _replace(self, member: Member, error: MoerlError) -> None:
        """Until a server holds the current weights, or the place is given up."""
        while member.losses < MAX_LOSSES:
            self._options.say(f"WARNING: SGLang server {member.name!r} is lost, taking another: {error}")
            self._change(member, State.RESTARTING)
            await member.disconnect()
            await backoff(member.losses)
            member.losses += 1
            try:
                await self._take(member)
            except (EngineError, WeightSyncError) as again:
                error = again
            else:
                self._go_on_with(member)
                return
        await member.disconnect()
        await asyncio.to_thread(member.source.close)
        member.error = error
        self._options.say(f"WARNING: SGLang server {member.name!r} is given up: {error}")
        self._change(member, State.DEAD)

    def _go_on_with(self, member: Member) -> None:
        self._change(member, State.HEALTHY)
        self._options.say(f"SGLang server {member.name!r}: going on")

    def _suspect(self, member: Member, error: EngineError) -> None:
        if member.state is State.HEALTHY:
            member.error = error
            self._change(member, State.SUSPECT)
            self._start(self._probe(member))

    async def _probe(self, member: Member) -> None:
        """Until the server answers something, or has not for four times."""
        for attempt in range(NUM_ATTEMPTS):
            if attempt:
                await backoff(attempt - 1)
            await self._samples.wait()
            if member.state is not State.SUSPECT or member.client is None:
                return
            try:
                await member.client.probe()
            except EngineError as error:
                if self._samples.is_set():  # while sampling is paused nobody answers
                    member.error = error
                continue
            member.heard_at = time.monotonic()
            if member.state is State.SUSPECT:
                self._change(member, State.HEALTHY)
            return
        if member.state is State.SUSPECT:
            assert member.error is not None
            self.lose(member, member.error)

    async def _watch(self) -> None:
        """Suspects servers that have work and say nothing."""
        while True:
            await asyncio.sleep(self._options.probe_seconds / 4)
            silent_since = time.monotonic() - self._options.probe_seconds
            for member in self.members:
                if self._samples.is_set() and member.load and member.heard_at < silent_since:
                    member.heard_at = time.monotonic()
                    self._suspect(member, _silent(member, self._options.probe_seconds))

    # --- state -------------------------------------------------------------------------------------------------------

    def _change(self, member: Member, state: State) -> None:
        member.state = state
        self._changed.set()
        self._turn_away()
        self._hand_out()

    def _end_of_all(self) -> BaseException | None:
        """Why no server will ever be had again."""
        if self._crash is None and all(member.state is State.DEAD for member in self.members):
            return self.members[-1].error
        return self._crash

    def _turn_away(self) -> None:
        error = self._end_of_all()
        while error is not None and self._waiting:
            _, place = self._waiting.popleft()
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
        """What nobody expected ends the call under way: nothing may wait for a server that nobody looks after."""
        self._work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._changed.set()
            self._turn_away()


def first_error(error: BaseException) -> BaseException:
    """The first one of a task group, if it is one's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def stale_server(member: Member, seen: int, expected: int) -> StaleServerError:
    return StaleServerError(
        f"SGLang server {member.name!r}: other weights",
        seen=f"policy version {seen}",
        expected=expected,
        remedy="let nobody else update or restart this server",
    )


def _silent(member: Member, seconds: float) -> TransportError:
    return TransportError(
        f"SGLang server {member.name!r} works on {member.load} requests and says nothing",
        seen=f"no answer for {seconds} s",
        expected="an answer, or a token for a probe",
        remedy="look at its log",
    )
