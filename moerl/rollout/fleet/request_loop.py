"""Rollouts of a call, asked for until they are finished. Runs in the engine's event loop.

A rollout that a server did not finish is asked for again, of any server, under its rollout id; one that a weight update
cut short goes on behind what it has.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moerl.contract.ports import RolloutRecord, RolloutRequest, SamplingCosts
from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.errors import ContractError, EngineError
from moerl.rollout.fleet.backend import Attempt, AttemptReply, KeyRefusedError, TransportError, new_request_id
from moerl.rollout.fleet.backoff import NUM_ATTEMPTS, backoff
from moerl.rollout.fleet.dispatch import Homes
from moerl.rollout.fleet.fleet import MAX_LOSSES, Fleet, stale_server
from moerl.rollout.fleet.replica import Replica
from moerl.rollout.segments import Segment, trajectory_values
from moerl.rollout.stream import left_out

_ABORT_AGAIN_SECONDS = 0.2
MAX_FAILURES = NUM_ATTEMPTS * (MAX_LOSSES + 1)
"""Attempts at one rollout that bring no answer before the call ends: it may be the rollout that brings servers down."""


@dataclass(slots=True)
class Rollout:
    """One rollout of a call."""

    request: RolloutRequest
    """Request for the whole rollout."""
    segments: list[Segment] = field(default_factory=list)
    """Tokens that earlier attempts brought."""
    replica: Replica | None = None
    """Place of the server that works on it; None between attempts."""
    request_id: str = ""
    """Id of the latest attempt; empty before the first."""
    epoch: int = 0
    """Value of `RequestLoop.epoch` when the latest attempt began."""
    version: int = -1
    """Policy version of the servers then; -1 before the first attempt."""
    num_failed: int = 0
    """Attempts without an answer."""
    num_damaged: int = 0
    """Attempts with an answer that cannot be read."""
    admitted_at: float = 0.0
    """Time at which the first attempt began, in seconds of `time.perf_counter`; 0 before it."""
    is_aborted: bool = False
    """True once the caller of the engine has aborted it."""
    submitted_at: float = field(default_factory=time.perf_counter)
    """Time at which it was asked for, in seconds of `time.perf_counter`."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids.tolist())

    @property
    def num_sampled(self) -> int:
        return sum(len(segment) for segment in self.segments)


@dataclass(slots=True)
class Call:
    """State of one stream of requests. It belongs to the event loop, but for `outcomes`."""

    rollouts: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    """Rollouts that are being asked for, by id."""
    submitted: asyncio.Queue[Sequence[Rollout] | None] = field(default_factory=asyncio.Queue)
    """Rollouts to ask for; None ends them."""
    outcomes: queue.SimpleQueue[list[RolloutRecord] | None] = field(default_factory=queue.SimpleQueue)
    """Records for the thread that iterates the stream; None ends them."""
    homes: Homes = field(default_factory=Homes)
    """Servers that have prefixes of its rollouts."""

    def add(self, rollouts: Sequence[Rollout] | None) -> None:
        """Adds rollouts to ask for; None if no more will come."""
        self.rollouts |= {rollout.request.lineage.rollout_id: rollout for rollout in rollouts or ()}
        self.submitted.put_nowait(rollouts)


class RequestLoop:
    """The requests of one engine to the servers of its fleet.

    Attributes:
        version: policy version that servers hold. epoch: counts weight updates that may cut responses short.
        is_cutting: True while such an update does so.
    """

    def __init__(self, fleet: Fleet, spec: ModelSpec, costs: SamplingCosts, version: int) -> None:
        self._fleet, self._spec, self._costs = fleet, spec, costs
        self.version, self.epoch, self.is_cutting = version, 0, False

    async def serve(self, call: Call) -> None:
        """Puts a record for every submitted rollout into `call.outcomes`; `left_out` for those aborted before their
        first token.

        Raises:
            ExceptionGroup: of EngineError: a server refused a request, or all servers were given up.
        """
        await self._fleet.check_versions(self.version)
        async with asyncio.TaskGroup() as tasks:
            while (rollouts := await call.submitted.get()) is not None:
                for rollout in rollouts:
                    tasks.create_task(self._answer(call, rollout))
                if not rollouts:
                    call.outcomes.put([])

    async def abort(self, call: Call, rollout_ids: Collection[str] | None) -> None:
        """Finishes the named rollouts (all when None) with what they have."""
        names = call.rollouts if rollout_ids is None else rollout_ids
        rollouts = [call.rollouts[name] for name in names if name in call.rollouts]
        for rollout in rollouts:
            rollout.is_aborted = True
        await self.cut_short(rollouts)

    async def cut_all_short(self, rollouts: Sequence[Rollout]) -> None:
        """Repeats `cut_short` until no request is under way. Rollouts that were cut short go on when they are asked for
        again."""
        self.epoch += 1
        self.is_cutting = True
        idle = asyncio.ensure_future(self._fleet.require_idle())
        try:
            while not idle.done():
                # Again and again: a request may have been on its way when the server got the call.
                await self.cut_short(rollouts)
                await asyncio.wait({idle}, timeout=_ABORT_AGAIN_SECONDS)
        finally:
            idle.cancel()
            self.is_cutting = False

    async def cut_short(self, rollouts: Iterable[Rollout]) -> None:
        """Has servers answer with what they have; a server on which that call fails counts as failed."""
        await asyncio.gather(*(self._tell(rollout) for rollout in rollouts))

    async def _tell(self, rollout: Rollout) -> None:
        replica, asked_at = rollout.replica, time.monotonic()
        if replica is None or replica.server is None:
            return
        try:
            await replica.server.abort(rollout.request_id)
        except EngineError as error:
            self._fleet.failed(replica, error, asked_at)

    async def _answer(self, call: Call, rollout: Rollout) -> None:
        record = await self._finish(call, rollout)
        del call.rollouts[record.rollout_id]
        call.outcomes.put([record])

    async def _finish(self, call: Call, rollout: Rollout) -> RolloutRecord:
        """Asks until the rollout is finished; returns its record."""
        while True:
            reason = None
            replica = await self._fleet.admit(rollout.request.lineage, call.homes)
            rollout.admitted_at = rollout.admitted_at or time.perf_counter()
            try:
                reply = None if rollout.is_aborted else await self._ask(replica, rollout)
            finally:
                self._fleet.release(replica)
            try:
                if reply is not None:
                    reason = self._read(rollout, replica, reply)
            except ContractError as error:
                # A damaged answer is asked for again, under the same rollout id.
                rollout.num_damaged += 1
                if rollout.num_damaged == NUM_ATTEMPTS:
                    assert reply is not None
                    values = {"lineage": rollout.request.lineage, **reply.raw}
                    return self._record(rollout, replica, values, error)
                await backoff(rollout.num_damaged - 1)
            if reason is None and rollout.is_aborted:
                reason = FinishReason.ABORT
            if reason is not None:
                break
        if not rollout.segments:
            return left_out(rollout.request.lineage.rollout_id)
        values = trajectory_values(rollout.request, rollout.segments, reason, self._spec)
        return self._record(rollout, replica, values, None)

    async def _ask(self, replica: Replica, rollout: Rollout) -> AttemptReply | None:
        """Returns the answer to one attempt; None if there is none, after a report of that to the fleet.

        Raises:
            EngineError: the server refused the request, or too many attempts brought nothing.
        """
        request, sampled_ids = rollout.request, rollout.sampled_ids
        rollout.replica, rollout.request_id = replica, new_request_id(request.lineage.rollout_id)
        asked_at, rollout.epoch, rollout.version = time.monotonic(), self.epoch, self.version
        if sampled_ids:
            self._costs.recomputed_tokens += len(request.prompt_ids) + len(sampled_ids)
        try:
            reply = await replica.ask(Attempt(request, rollout.request_id, self.version, sampled_ids))
            self._require_answer(rollout, replica, reply)
        except KeyRefusedError as error:
            rollout.num_failed += 1
            self._fleet.lose(replica, error)
            return None
        except TransportError as error:
            rollout.num_failed += 1
            if rollout.num_failed == MAX_FAILURES:
                raise
            self._fleet.failed(replica, error, asked_at)
            return None
        finally:
            rollout.replica = None
        self._fleet.answered(replica)
        return reply

    def _require_answer(self, rollout: Rollout, replica: Replica, reply: AttemptReply) -> None:
        """Raises TransportError for an answer that was cut short though neither user nor update asked for it."""
        is_cut = self.is_cutting or rollout.epoch != self.epoch
        if reply.is_aborted and not rollout.is_aborted and not is_cut:
            raise TransportError(
                f"server {replica.name!r} broke off a request",
                seen="an answer with reason abort",
                expected="an answer",
                remedy="look at its log",
            )

    def _read(self, rollout: Rollout, replica: Replica, reply: AttemptReply) -> FinishReason | None:
        """Adds what an answer brought; returns what finished the rollout, None if it is to go on.

        Raises:
            ContractError: the answer cannot be read.
            EngineError: it is shorter or longer than asked for.
        """
        answer = reply.decode()
        self._costs.asked_tokens += answer.asked_tokens
        self._costs.cached_tokens += answer.cached_tokens
        segment = answer.segment
        if segment is not None:
            last_version = int(segment.policy_versions[-1])
            if last_version < rollout.version:
                self._fleet.lose(replica, stale_server(replica, last_version, rollout.version))
                return None
            self._count_recomputed(rollout, segment)
            rollout.segments.append(segment)
        if answer.reason == FinishReason.ABORT:
            return None if segment is None else _finished(rollout)
        _check_length(rollout, answer.reason)
        return answer.reason

    def _count_recomputed(self, rollout: Rollout, segment: Segment) -> None:
        """Counts the tokens that a server computed again: all that were there before, each time it goes on with other
        weights."""
        versions = segment.policy_versions
        before = len(rollout.request.prompt_ids) + rollout.num_sampled
        for at in (versions[1:] != versions[:-1]).nonzero()[0].tolist():
            self._costs.recomputed_tokens += before + at + 1

    def _record(
        self, rollout: Rollout, replica: Replica, values: dict[str, Any], refusal: ContractError | None
    ) -> RolloutRecord:
        now, name = time.perf_counter(), rollout.request.lineage.rollout_id
        timings = {
            "waiting_seconds": rollout.admitted_at - rollout.submitted_at,
            "sampling_seconds": now - rollout.admitted_at,
        }
        attempt = rollout.num_failed + rollout.num_damaged
        values |= {"engine_id": replica.name, "attempt": attempt, "timings": timings}
        return RolloutRecord(name, replica.name, self.version, values, refusal)


def _finished(rollout: Rollout) -> FinishReason | None:
    """Returns what finished a rollout, by its tokens: a stop id at the end, or the full length; None if neither did."""
    if rollout.segments and rollout.segments[-1].token_ids[-1] in rollout.request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if rollout.num_sampled == rollout.request.max_new_tokens else None


def _check_length(rollout: Rollout, reason: FinishReason) -> None:
    """Raises EngineError if a response is longer or, without a stop token, shorter than asked for."""
    count, asked = rollout.num_sampled, rollout.request.max_new_tokens
    is_whole = _finished(rollout) == FinishReason.STOP if reason == FinishReason.STOP else count == asked
    if count > asked or not is_whole:
        raise EngineError(
            f"rollout {rollout.request.lineage.rollout_id!r}: length of the response",
            seen=f"{count} tokens, reason {reason}",
            expected=f"{asked} tokens, or a stop token",
            remedy="give the server a longer context or a larger KV pool",
        )
