"""Rollouts of a call, asked for until they are finished. Runs in the engine's event loop.

One that a server did not finish is asked for again, of any server, under its rollout id; one that a weight update cut
short goes on behind what it has.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from moerl.contract.ports import InterruptCosts, RolloutRecord, RolloutRequest
from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.errors import ContractError, EngineError
from moerl.rollout.sglang.answers import (
    Segment,
    decode_compact,
    finish_reason,
    num_sampled,
    read_segment,
    trajectory_values,
    version_spans,
)
from moerl.rollout.sglang.bounds import answer_bounds
from moerl.rollout.sglang.client import new_request_id, request_body
from moerl.rollout.sglang.fleet import MAX_LOSSES, Fleet, stale_server
from moerl.rollout.sglang.http import NUM_ATTEMPTS, KeyRefusedError, backoff
from moerl.rollout.sglang.member import Member
from moerl.rollout.sglang.reading import TransportError

MAX_FAILURES = NUM_ATTEMPTS * (MAX_LOSSES + 1)
"""Attempts at one rollout that bring no answer before the call ends: it may be the rollout that brings servers down."""


@dataclass(slots=True)
class Rollout:
    """One rollout of a call.

    segments: what earlier attempts brought. member, request_id: of the attempt that a server works on.
    asked_at: when, by the monotonic clock. epoch, version: of the weights then. num_failed: attempts without an answer.
    num_damaged: attempts with an answer that cannot be read. admitted_at: when the first attempt began.
    """

    request: RolloutRequest
    segments: list[Segment] = field(default_factory=list)
    member: Member | None = None
    request_id: str = ""
    asked_at: float = 0.0
    epoch: int = 0
    version: int = -1
    num_failed: int = 0
    num_damaged: int = 0
    admitted_at: float = 0.0
    is_aborted: bool = False

    @property
    def sampled_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids.tolist()]

    @property
    def num_sampled(self) -> int:
        return sum(len(segment) for segment in self.segments)


@dataclass(slots=True)
class Run:
    """State of one `generate` call; belongs to the event loop, but for `outcomes`, which ends with None."""

    rollouts: dict[str, Rollout]
    outcomes: queue.SimpleQueue[RolloutRecord | None] = field(default_factory=queue.SimpleQueue)
    asked_at: float = field(default_factory=time.perf_counter)


class Asking:
    """Asks the servers of a fleet.

    Attributes:
        version: policy version that servers hold. epoch: counts weight updates that may cut responses short.
        is_cutting: one is doing so now.
    """

    def __init__(self, fleet: Fleet, spec: ModelSpec, costs: InterruptCosts, version: int) -> None:
        self._fleet, self._spec, self._costs = fleet, spec, costs
        self.version, self.epoch, self.is_cutting = version, 0, False

    async def serve(self, run: Run) -> None:
        """Puts a record for every rollout into `run.outcomes`, but for those aborted before their first token.

        Raises:
            ExceptionGroup: of EngineError: a server refused a request, or all servers were given up.
        """
        await self._fleet.muster(self.version)
        async with asyncio.TaskGroup() as tasks:
            for rollout in run.rollouts.values():
                tasks.create_task(self._finish(run, rollout))

    async def abort(self, run: Run, rollout_ids: Collection[str] | None) -> None:
        """Finishes the named rollouts (all when None) with what they have."""
        names = run.rollouts if rollout_ids is None else rollout_ids
        rollouts = [run.rollouts[name] for name in names if name in run.rollouts]
        for rollout in rollouts:
            rollout.is_aborted = True
        await self.cut_short(rollouts)

    async def cut_short(self, rollouts: Iterable[Rollout]) -> None:
        """Has servers answer with what they have; one that cannot be told is looked after."""
        await asyncio.gather(*(self._tell(rollout) for rollout in rollouts))

    async def _tell(self, rollout: Rollout) -> None:
        member, asked_at = rollout.member, time.monotonic()
        if member is None or member.client is None:
            return
        try:
            await member.client.abort(rollout.request_id)
        except EngineError as error:
            self._fleet.failed(member, error, asked_at)

    async def _finish(self, run: Run, rollout: Rollout) -> None:
        """Asks until the rollout is finished, and delivers it."""
        reason = None
        while reason is None:
            member = await self._fleet.admit(rollout.request.lineage.group_id)
            rollout.admitted_at = rollout.admitted_at or time.perf_counter()
            try:
                meta = None if rollout.is_aborted else await self._ask(member, rollout)
            finally:
                self._fleet.release(member)
            try:
                if meta is not None:
                    reason = self._read(rollout, member, meta)
            except ContractError as error:
                # A damaged answer is asked for again, under the same rollout id.
                rollout.num_damaged += 1
                if rollout.num_damaged == NUM_ATTEMPTS:
                    values = {"lineage": rollout.request.lineage, "meta_info": meta}
                    self._deliver(run, rollout, member, values, error)
                    return
                await backoff(rollout.num_damaged - 1)
            if reason is None and rollout.is_aborted:
                reason = FinishReason.ABORT
        if rollout.segments:
            values = trajectory_values(rollout.request, rollout.segments, reason, self._spec)
            self._deliver(run, rollout, member, values, None)

    async def _ask(self, member: Member, rollout: Rollout) -> dict[str, Any] | None:
        """The `meta_info` of the answer to one attempt; None where there is none, and the server is looked after.

        Raises:
            EngineError: the server refused the request, or too many attempts brought nothing.
        """
        request, sampled_ids = rollout.request, rollout.sampled_ids
        rollout.member, rollout.request_id = member, new_request_id(request.lineage.rollout_id)
        rollout.asked_at, rollout.epoch, rollout.version = time.monotonic(), self.epoch, self.version
        if sampled_ids:
            self._costs.recomputed_tokens += len(request.prompt_ids) + len(sampled_ids)
        try:
            body = request_body(request, rollout.request_id, self.version, sampled_ids)
            meta = await member.ask(body, answer_bounds(request, len(sampled_ids), self._spec))
            self._require_answer(rollout, member, meta)
        except KeyRefusedError as error:
            rollout.num_failed += 1
            self._fleet.lose(member, error)
            return None
        except TransportError as error:
            rollout.num_failed += 1
            if rollout.num_failed == MAX_FAILURES:
                raise
            self._fleet.failed(member, error, rollout.asked_at)
            return None
        finally:
            rollout.member = None
        self._fleet.answered(member)
        return meta

    def _require_answer(self, rollout: Rollout, member: Member, meta: dict[str, Any]) -> None:
        """An answer that was cut short though neither user nor update asked for it is none."""
        kind = meta.get("finish_reason")
        is_abort = isinstance(kind, dict) and kind.get("type") == "abort"
        is_cut = self.is_cutting or rollout.epoch != self.epoch
        if is_abort and not rollout.is_aborted and not is_cut:
            raise TransportError(
                f"SGLang server {member.name!r} broke off a request",
                seen=kind,
                expected="an answer",
                remedy="look at its log",
            )

    def _read(self, rollout: Rollout, member: Member, meta: dict[str, Any]) -> FinishReason | None:
        """Adds what an answer brought; what finished the rollout, None where it is to go on.

        Raises:
            ContractError: the answer cannot be read.
            EngineError: it is shorter or longer than asked for.
        """
        reason = finish_reason(meta)
        if reason == FinishReason.ABORT and "compact_answer" not in meta:
            return None
        bounds = answer_bounds(rollout.request, rollout.num_sampled, self._spec)
        answer = decode_compact(meta.get("compact_answer"), bounds.payload_bytes)
        if num_sampled(answer) > 0:
            spans = version_spans(meta)
            segment = read_segment(rollout.request, answer, spans, rollout.num_sampled, self._spec)
            last_version = int(segment.policy_versions[-1])
            if last_version < rollout.version:
                self._fleet.lose(member, stale_server(member, last_version, rollout.version))
                return None
            self._count_recomputed(rollout, segment)
            rollout.segments.append(segment)
        if reason == FinishReason.ABORT:
            return _whole(rollout)
        _check_length(rollout, reason)
        return reason

    def _count_recomputed(self, rollout: Rollout, segment: Segment) -> None:
        """A server that goes on with other weights computes all that was there before again."""
        versions = segment.policy_versions
        before = len(rollout.request.prompt_ids) + rollout.num_sampled
        for at in (versions[1:] != versions[:-1]).nonzero()[0].tolist():
            self._costs.recomputed_tokens += before + at + 1

    def _deliver(
        self, run: Run, rollout: Rollout, member: Member, values: dict[str, Any], refusal: ContractError | None
    ) -> None:
        now, name = time.perf_counter(), rollout.request.lineage.rollout_id
        timings = {
            "waiting_seconds": rollout.admitted_at - run.asked_at,
            "sampling_seconds": now - rollout.admitted_at,
        }
        attempt = rollout.num_failed + rollout.num_damaged
        values |= {"engine_id": member.name, "attempt": attempt, "timings": timings}
        run.outcomes.put(RolloutRecord(name, member.name, self.version, values, refusal))


def _whole(rollout: Rollout) -> FinishReason | None:
    """What had finished a rollout when it was cut short; None where it was not finished."""
    if rollout.segments and rollout.segments[-1].token_ids[-1] in rollout.request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if rollout.num_sampled == rollout.request.max_new_tokens else None


def _check_length(rollout: Rollout, reason: FinishReason) -> None:
    """A response that is shorter than asked for is no response of that length."""
    count, asked = rollout.num_sampled, rollout.request.max_new_tokens
    is_whole = _whole(rollout) == FinishReason.STOP if reason == FinishReason.STOP else count == asked
    if count > asked or not is_whole:
        raise EngineError(
            f"rollout {rollout.request.lineage.rollout_id!r}: length of the response",
            seen=f"{count} tokens, reason {reason}",
            expected=f"{asked} tokens, or a stop token",
            remedy="give the server a longer context or a larger KV pool",
        )
