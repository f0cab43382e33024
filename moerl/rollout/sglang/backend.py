"""SGLang as a backend of the fleet. Runs in the engine's event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams
from moerl.errors import EngineError
from moerl.rollout.fleet.backend import Attempt, AttemptReply, AttemptResult, ModelFacts, TransportError, new_request_id
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.sglang.answers import cached_tokens, finish_reason, read_segment, sampled_answer, version_spans
from moerl.rollout.sglang.channel import ChannelAddress, SGLangChannel
from moerl.rollout.sglang.client import answer_bounds, read_meta, request_body, server_facts
from moerl.rollout.sglang.digests import ServedModel, weight_digests, weight_dtypes
from moerl.rollout.sglang.handshake import ServerFacts, read_version
from moerl.rollout.sglang.http import MAX_FACTS_BYTES, SGLangHttp, decoded
from moerl.rollout.sglang.many_answers import PATH, ManyAnswers
from moerl.rollout.sglang.update_calls import UpdateCalls

_PROBE = RolloutRequest(Lineage("probe", "probe", "probe"), (0,), SamplingParams(temperature=0.0), 1)


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
        http = SGLangHttp(endpoint, max_connections=options.max_running, timeout_seconds=options.probe_seconds)
        try:
            facts = await server_facts(http, self.model)
            self._check(facts)
            # A server's lasting objects are no garbage: its collector would look through them at every update.
            await http.admin("/freeze_gc", {})
        except BaseException:  # cancelled, too
            await http.close()
            raise
        return SGLangBackend(name, http, facts, self)

    def _check(self, facts: ServerFacts) -> None:
        """Refuses a server of another precision than the engine's, or of another release than the first server's."""
        dtype = self.options.dtype
        if facts.dtype.removeprefix("torch.") != dtype:
            raise EngineError(
                "SGLang server: precision",
                seen=facts.dtype,
                expected=f"rollout.dtype = {dtype}",
                remedy=f"moerl serve --dtype {dtype}, or set rollout.dtype",
            )
        if not self.releases:
            self.releases.add(facts.version)
        if facts.version not in self.releases:
            raise EngineError(
                "SGLang servers of different releases",
                seen=facts.version,
                expected=f"{', '.join(self.releases)}, as the first server",
                remedy="start all servers from environments of one release",
            )


class SGLangBackend(UpdateCalls):
    """A `ServerBackend`: one server, over the one client that this process has of it."""

    def __init__(self, name: str, http: SGLangHttp, facts: ServerFacts, made_by: SGLangConnect) -> None:
        options, self._spec = made_by.options, made_by.model.spec
        super().__init__(name, http, options.update_seconds)
        self._answers = ManyAnswers(http, options.response_seconds)
        self.max_request_tokens = facts.report.max_request_tokens
        self.first_version = facts.policy_version
        self._served = ServedModel(options.shapes, facts.num_ranks, options.tied)
        transfers = "gloo" if facts.device == "cpu" or options.shares_devices else "nccl"
        self._channel_address = ChannelAddress(http.endpoint, facts.num_ranks, transfers, options.update_seconds)
        self.address: Mapping[str, Any] = msgspec.to_builtins(self._channel_address)
        self._channels: list[SGLangChannel] = []

    async def ask(self, attempt: Attempt) -> AttemptReply:
        request, sampled_ids = attempt.request, attempt.sampled_ids
        bounds = answer_bounds(request, len(sampled_ids), self._spec)
        body = request_body(request, attempt.request_id, attempt.policy_version, sampled_ids)
        content = await self._answers.ask(body, bounds.response_bytes)
        meta = decoded(PATH, content, lambda content: read_meta(content, bounds))
        if meta.get("id") != body["rid"]:
            raise TransportError(
                f"SGLang {PATH}: an answer to another request", seen=meta.get("id"), expected=body["rid"]
            )
        kind = meta.get("finish_reason")
        is_aborted = isinstance(kind, dict) and kind.get("type") == "abort"
        return AttemptReply(is_aborted, {"meta_info": meta}, lambda: self._decode(attempt, meta, bounds.payload_bytes))

    def _decode(self, attempt: Attempt, meta: Mapping[str, Any], payload_bytes: int) -> AttemptResult:
        reason = finish_reason(meta)
        answer = sampled_answer(meta, reason, payload_bytes)
        if answer is None:
            return AttemptResult(reason, None)
        request, num_before = attempt.request, len(attempt.sampled_ids)
        segment = read_segment(request, answer, version_spans(meta), num_before, self._spec)
        num_sent = len(request.prompt_ids) + num_before
        return AttemptResult(reason, segment, num_sent, cached_tokens(meta, num_sent))

    async def abort(self, request_id: str) -> None:
        await self.http.admin("/abort_request", {"rid": request_id})

    async def probe(self) -> None:
        body = request_body(_PROBE, new_request_id("probe"), -1)
        await self.http.call_once("/generate", body, MAX_FACTS_BYTES)

    async def policy_version(self) -> int:
        return read_version(str((await self.http.get_once("/model_info")).get("weight_version")))

    async def digests(self) -> Mapping[str, int]:
        return await weight_digests(self.http, self._served, self.seconds)

    async def dtypes(self) -> Mapping[str, str]:
        return await weight_dtypes(self.http, self._served, self.seconds)

    def open_channel(self) -> SGLangChannel:
        channel = SGLangChannel(self, self._channel_address, torch.device("cuda"))
        self._channels.append(channel)
        return channel

    async def close(self) -> None:
        for channel in self._channels:
            await channel.abandon()
        await self._answers.close()
        await self.http.close()
