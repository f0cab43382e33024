"""A server backend in memory, as good or as bad as a test asks (fault injection): no process, no port, no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import pytest
from torch import Tensor

from moerl.contract.commands import Target
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, Lineage, ModelSpec, SamplingParams
from moerl.errors import ContractError, EngineError, WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.processes.loop_thread import LoopThread
from moerl.rollout.fleet.backend import (
    Attempt,
    AttemptReply,
    AttemptResult,
    Bucket,
    KeyRefusedError,
    ModelFacts,
    TransportError,
)
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.fleet.sender import attempt
from moerl.rollout.segments import Segment, first_row

SPEC = ModelSpec(num_moe_layers=2, experts_per_token=2, num_experts=8, vocab_size=50, fingerprint="fake")
MODEL = ModelFacts(SPEC, (1, 3))
_NUMBERS = itertools.count()


def arrived(content: AttemptResult | ContractError) -> AttemptReply:
    """An answer that is, or cannot be, decoded."""

    def decode() -> AttemptResult:
        if isinstance(content, ContractError):
            raise content
        return content

    is_aborted = isinstance(content, AttemptResult) and content.reason is FinishReason.ABORT
    return AttemptReply(is_aborted, {"fake": b"what arrived"}, decode)


def reply(attempt: Attempt, version: int, count: int | None = None) -> AttemptReply:
    """A valid answer of `count` tokens, where that is given cut short. Token t is t + 1, kept with its neighbour."""
    request, num_before = attempt.request, len(attempt.sampled_ids)
    reason = FinishReason.LENGTH if count is None else FinishReason.ABORT
    count = request.max_new_tokens - num_before if count is None else count
    if count == 0:
        return arrived(AttemptResult(reason, None))
    ids = np.arange(1, count + 1, dtype=np.int32)
    num_rows = len(request.prompt_ids) + num_before + count - 1 - first_row(request, num_before)
    cuts = request.sampling.cuts
    segment = Segment(
        token_ids=ids,
        rollout_logprobs=np.full(count, -0.5, np.float32),
        kept_logmass=np.full(count, -1.0 if cuts else 0.0, np.float32),
        policy_versions=np.full(count, version, np.int32),
        kept_sizes=np.full(count, 2 if cuts else 0, np.int64),
        kept_ids=np.stack([ids, ids + 1], 1).reshape(-1) if cuts else np.zeros(0, np.int32),
        expert_ids=np.tile(np.array([1, 5], np.uint8), (num_rows, 2, 1)),
    )
    return arrived(AttemptResult(reason, segment))


class FakeServer:
    """A server; `answer` may be replaced by a test, and may block or raise.

    attempts: of all requests for rollouts, in order. answers_probes: it has one token sampled when it is asked to.
    key: that clients must know; each takes the one of the time when it connects. weight_version: that it says.
    token_version: of what it samples, where that is another one. sent, held: tensors since an update began, and of the
    latest update. samples: it may sample. digests: what it says that it holds. before: by step, what happens before it.
    steps: that went well. refusal: why it cannot be used.
    """

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.aborted: list[str] = []
        self.answers_probes, self.answers_aborts = True, True
        self.key = "key"
        self.weight_version = 3
        self.token_version: int | None = None
        self.sent: dict[str, Tensor] = {}
        self.held: dict[str, Tensor] = {}
        self.samples = True
        self.digests: Callable[[], Mapping[str, int]] = lambda: checksums(self.held.items())
        self.before: dict[str, Callable[[], None]] = {}
        self.steps: list[str] = []
        self.refusal: EngineError | None = None
        self.answer: Callable[[Attempt], AttemptReply] = self.good
        self.endpoint = Endpoint(f"http://fake-{next(_NUMBERS)}", "key", "admin")

    def good(self, attempt: Attempt) -> AttemptReply:
        return reply(attempt, self.weight_version if self.token_version is None else self.token_version)

    def fail(self, step: str, error: Exception | None = None) -> None:
        """The step fails."""

        def raise_it() -> None:
            raise error or WeightSyncError(f"{step} failed")

        self.before[step] = raise_it

    @property
    def asked(self) -> list[str]:
        """The rollout ids of `attempts`."""
        return [attempt.request.lineage.rollout_id for attempt in self.attempts]

    async def step(self, name: str) -> None:
        await asyncio.to_thread(self.before.get(name, lambda: None))
        self.steps.append(name)


def hang_up(attempt: Attempt) -> AttemptReply:
    """Instead of an answer."""
    raise TransportError("fake: the connection failed")


class FakeBackend:
    """A connection to a fake server, which fails once it is closed."""

    def __init__(self, server: FakeServer) -> None:
        self._server, self._key, self._is_closed = server, server.key, False
        self.max_request_tokens, self.first_version = 100, server.weight_version
        self.address: Mapping[str, Any] = {"url": server.endpoint.url}

    def _require_key(self) -> None:
        if self._is_closed:
            raise TransportError("fake: the server was given up")
        if self._key != self._server.key:
            raise KeyRefusedError("fake: the server does not know our key")

    async def ask(self, attempt: Attempt) -> AttemptReply:
        self._require_key()
        self._server.attempts.append(attempt)
        return await asyncio.to_thread(self._server.answer, attempt)

    async def abort(self, request_id: str) -> None:
        self._require_key()
        self._server.aborted.append(request_id)
        if not self._server.answers_aborts:
            raise EngineError("fake: refused")

    async def probe(self) -> None:
        self._require_key()
        if not self._server.answers_probes:
            raise TransportError("fake: no token for a probe")

    async def policy_version(self) -> int:
        self._require_key()
        return self._server.weight_version

    async def sleep(self) -> None:
        await self._server.step("sleep")
        self._server.samples, self._server.weight_version, self._server.held = False, -1, {}

    async def begin_update(self) -> None:
        await self._server.step("begin")
        self._server.samples, self._server.weight_version, self._server.sent = False, -1, {}

    async def end_update(self, version: int) -> None:
        await self._server.step("end")
        self._server.held, self._server.weight_version = self._server.sent, version

    async def resume(self) -> None:
        await self._server.step("resume")
        self._server.samples = True

    async def digests(self) -> Mapping[str, int]:
        return self._server.digests()

    async def dtypes(self) -> Mapping[str, str]:
        return FLOAT32

    def open_channel(self) -> FakeChannel:
        return FakeChannel(self._server)

    async def close(self) -> None:
        self._is_closed = True


FLOAT32 = dict.fromkeys("abc", "float32")
"""By the names of the tensors that tests send."""


class FakeChannel:
    """sender: before the names of its steps."""

    def __init__(self, server: FakeServer, sender: str = "") -> None:
        self._server, self._sender = server, sender

        self._has_joined = False
        self.network = sender

    def new_group(self) -> FakeGroup:
        return FakeGroup()

    async def send(self, bucket: Iterable[tuple[str, Tensor]], number: int) -> None:
        if not self._has_joined:
            await self._server.step(f"{self._sender}join")
            self._has_joined = True
        await self._server.step(f"{self._sender}bucket {number}")
        self._server.sent |= {name: tensor.clone() for name, tensor in bucket}

    async def close(self) -> None:
        """There is no group to leave."""

    abandon = close


class FakeGroup:
    """Sends to each server by itself."""

    async def send(
        self, bucket: Bucket, channels: Mapping[str, FakeChannel], number: int
    ) -> Mapping[str, WeightSyncError]:
        async def send(channel: FakeChannel) -> None:
            await channel.send(bucket, number)

        errors = await asyncio.gather(*(attempt(send, channel) for channel in channels.values()))
        return {key: error for key, error in zip(channels, errors, strict=True) if error is not None}

    def leave(self) -> None:
        """There is no group."""


class Served(Protocol):
    """A fake server of any kind."""

    @property
    def endpoint(self) -> Endpoint: ...


class FakeLauncher:
    """Gives fake servers, one after the other; the last one for ever."""

    def __init__(self, *servers: Served) -> None:
        self.servers, self.num_opened, self.is_closed = servers, 0, False

    def open(self) -> Endpoint:
        self.num_opened += 1
        return self.servers[min(self.num_opened, len(self.servers)) - 1].endpoint

    def close(self) -> None:
        self.is_closed = True


class Network:
    """Network of fake servers."""

    def __init__(self, servers: Iterable[FakeServer]) -> None:
        self._servers = {server.endpoint.url: server for server in servers}

    async def connect(self, name: str, endpoint: Endpoint) -> FakeBackend:
        server = self._servers[endpoint.url]
        if server.refusal is not None:
            raise server.refusal
        return FakeBackend(server)

    def channel_of_part(self, target: Target) -> FakeChannel:
        """`open_channel` of a sender in another process; its steps begin with `part`."""
        return FakeChannel(self._servers[target.address["url"]], "part ")

    def engine(
        self, *launchers: FakeLauncher | FakeServer, version: int = 3, said: list[str] | None = None, **changes: Any
    ) -> FleetEngine:
        """changes: of `EngineOptions`."""
        changes["notify"] = ([] if said is None else said).append
        made = [launcher if isinstance(launcher, FakeLauncher) else FakeLauncher(launcher) for launcher in launchers]
        return FleetEngine(made, self.connect, MODEL, options(**changes), version)


def options(**changes: Any) -> EngineOptions:
    values: dict[str, Any] = {
        "engine_id": "e",
        "dtype": "float32",
        "max_running": 4,
        "response_seconds": 30.0,
        "probe_seconds": 30.0,
        "update_seconds": 5.0,
        "bucket_bytes": 1 << 20,
        "shapes": {},
        "tied": {},
        "notify": print,
    }
    return EngineOptions(**values | changes)


def make_requests(count: int, group_size: int = 1) -> list[RolloutRequest]:
    sampling = SamplingParams(top_p=0.9, seed=5)
    return [
        RolloutRequest(Lineage(f"r{i}", "p", f"g{i // group_size}"), (1, 2, 3), sampling, 4, (0,)) for i in range(count)
    ]


def fall_asleep_behind_a_call(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A thread that has begun a call of `generate` sleeps before it does anything else; event: it may go on."""
    start, go_on = LoopThread.start, threading.Event()

    def start_and_fall_asleep(loop: LoopThread, work: Any) -> Any:
        started = start(loop, work)
        if work.__name__ == "serve":
            assert go_on.wait(60.0)
        return started

    monkeypatch.setattr(LoopThread, "start", start_and_fall_asleep)
    return go_on
