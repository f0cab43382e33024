"""SGLang as a backend of the fleet. Runs in the engine's event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.errors import EngineError
from moerl.rollout.fleet.backend import Attempt, AttemptResult, ModelFacts, ServerLauncher
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.sglang.answers import (
    cached_tokens,
    decode_compact,
    finish_reason,
    num_sampled,
    read_segment,
    version_spans,
)
from moerl.rollout.sglang.bounds import AnswerBounds, answer_bounds
from moerl.rollout.sglang.channel import ChannelAddress, SGLangChannel
from moerl.rollout.sglang.client import ServerClient, request_body
from moerl.rollout.sglang.digests import ServedModel, weight_digests, weight_dtypes
from moerl.rollout.sglang.handshake import ServerFacts
from moerl.rollout.sglang.update_calls import UpdateCalls


def sglang_engine(
    launchers: Sequence[ServerLauncher], model: ModelFacts, options: EngineOptions, version: int
) -> FleetEngine:
    """Makes an engine on SGLang servers; arguments and errors as those of `FleetEngine`."""
    return FleetEngine(launchers, SGLangConnect(model, options), model, options, version)


@dataclass(frozen=True, slots=True)
class SGLangConnect:
    """`Connect` of SGLang servers."""

    model: ModelFacts
    """Facts that servers must match."""
    options: EngineOptions
    """Options of the engine; servers must have its dtype."""
    releases: set[str] = field(default_factory=set[str])
    """Release of the servers so far: one, since another server repeats a lost one's requests and must give the same
    tokens."""

    async def __call__(self, name: str, endpoint: Endpoint) -> SGLangBackend:
        options = self.options
        client = ServerClient(
            endpoint,
            max_connections=options.max_running,
            timeout_seconds=options.response_seconds,
            control_seconds=options.probe_seconds,
        )
        try:
            facts = await client.facts(self.model)
            _check_precision(facts, options.dtype)
            _check_release(facts, self.releases)
            # A server's lasting objects are no garbage: its collector would look through them at every update.
            await client.http.admin("/freeze_gc", {})
        except BaseException:  # cancelled, too
            await client.close()
            raise
        return SGLangBackend(name, client, facts, self)


@dataclass(frozen=True, slots=True)
class SGLangReply:
    """An answer to an attempt as it arrived."""

    meta: dict[str, Any]
    """Fields of `meta_info`."""
    attempt: Attempt
    """Attempt that is answered."""
    bounds: AnswerBounds
    """Bounds of what was asked for."""
    spec: ModelSpec
    """Spec of the trainer's model."""

    @property
    def is_aborted(self) -> bool:
        kind = self.meta.get("finish_reason")
        return isinstance(kind, dict) and kind.get("type") == "abort"

    @property
    def raw(self) -> Mapping[str, Any]:
        return {"meta_info": self.meta}

    def decode(self) -> AttemptResult:
        """Returns the result. Raises ContractError if the answer cannot be read."""
        reason = finish_reason(self.meta)
        if reason == FinishReason.ABORT and "compact_answer" not in self.meta:
            return AttemptResult(reason, None)
        answer = decode_compact(self.meta.get("compact_answer"), self.bounds.payload_bytes)
        if num_sampled(answer) == 0:
            return AttemptResult(reason, None)
        request, num_before = self.attempt.request, len(self.attempt.sampled_ids)
        segment = read_segment(request, answer, version_spans(self.meta), num_before, self.spec)
        num_sent = len(request.prompt_ids) + num_before
        return AttemptResult(reason, segment, num_sent, cached_tokens(self.meta, num_sent))


class SGLangBackend:
    """A `ServerBackend`: one server, over the one client that this process has of it."""

    def __init__(self, name: str, client: ServerClient, facts: ServerFacts, made_by: SGLangConnect) -> None:
        self._client, self._spec = client, made_by.model.spec
        options = made_by.options
        self.max_request_tokens = facts.report.max_request_tokens
        self.first_version = facts.policy_version
        self._served = ServedModel(options.shapes, facts.num_ranks, options.tied)
        self._updates = UpdateCalls(name, client.http, options.update_seconds)
        transfers = "gloo" if facts.device == "cpu" or options.shares_devices else "nccl"
        self._channel_address = ChannelAddress(client.http.endpoint, facts.num_ranks, transfers, options.update_seconds)
        self._channels: list[SGLangChannel] = []

    @property
    def address(self) -> Mapping[str, Any]:
        return msgspec.to_builtins(self._channel_address)

    async def ask(self, attempt: Attempt) -> SGLangReply:
        request, sampled_ids = attempt.request, attempt.sampled_ids
        bounds = answer_bounds(request, len(sampled_ids), self._spec)
        body = request_body(request, attempt.request_id, attempt.policy_version, sampled_ids)
        return SGLangReply(await self._client.ask(body, bounds), attempt, bounds, self._spec)

    async def abort(self, request_id: str) -> None:
        await self._client.abort(request_id)

    async def probe(self) -> None:
        await self._client.probe()

    async def policy_version(self) -> int:
        return await self._client.policy_version()

    async def sleep(self) -> None:
        await self._updates.sleep()

    async def begin_update(self) -> None:
        await self._updates.begin()

    async def end_update(self, version: int) -> None:
        await self._updates.end(version)

    async def resume(self) -> None:
        await self._updates.resume()

    async def digests(self) -> Mapping[str, int]:
        return await weight_digests(self._client.http, self._served, self._updates.seconds)

    async def dtypes(self) -> Mapping[str, str]:
        return await weight_dtypes(self._client.http, self._served, self._updates.seconds)

    def open_channel(self) -> SGLangChannel:
        channel = SGLangChannel(self._updates, self._channel_address, torch.device("cuda"))
        self._channels.append(channel)
        return channel

    async def close(self) -> None:
        for channel in self._channels:
            await channel.abandon()
        await self._client.close()


def _check_release(facts: ServerFacts, releases: set[str]) -> None:
    """Remembers the release of the first server, and refuses servers of another one."""
    if not releases:
        releases.add(facts.version)
    if facts.version not in releases:
        raise EngineError(
            "SGLang servers of different releases",
            seen=facts.version,
            expected=f"{', '.join(releases)}, as the first server",
            remedy="start all servers from environments of one release",
        )


def _check_precision(facts: ServerFacts, dtype: str) -> None:
    if facts.dtype.removeprefix("torch.") != dtype:
        raise EngineError(
            "SGLang server: precision",
            seen=facts.dtype,
            expected=f"rollout.dtype = {dtype}",
            remedy=f"moerl serve --dtype {dtype}, or set rollout.dtype",
        )
