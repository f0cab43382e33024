"""An SGLang server as the trainer's engine: watched, replaced when it fails, never used with other weights.

Runs in the trainer process that asks for rollouts. A server is lost when it gives no whole answer to any attempt, does
not know our key, or breaks off a weight update: dead, hanging or replaced behind our back makes no difference. Then the
source gives one that serves, it gets the weights that the lost one had (or was about to get), and only then the
rollouts that have no answer yet are asked for again, under their ids. Each rollout yields one record at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moerl.contract.ports import EngineInfo, RolloutRecord, RolloutRequest
from moerl.errors import EngineError, WeightSyncError
from moerl.rollout.requests import check_requests
from moerl.rollout.sglang.engine import ModelFacts, SGLangEngine
from moerl.rollout.sglang.http import NUM_ATTEMPTS, KeyRefusedError, TransportError
from moerl.rollout.sglang.sources import ServerSource
from moerl.rollout.sglang.weight_set import WeightSet
from moerl.rollout.sglang.weights import SGLangWeights, WeightTransport

MAX_LOSSES = 3
"""Servers lost in a row, without an answer in between, before the run gives up."""


class StaleServerError(EngineError):
    """The server holds other weights than it should."""


@dataclass(frozen=True, slots=True)
class SupervisedOptions:
    """How the trainer and a server work together.

    dtype: of the server's weights; float32 or bfloat16. max_running: requests that are with the server together.
    response_seconds: longest time from asking for a response to having it. update_seconds: for each step of a weight
    update. shapes, tied: of the model's tensors, as in `WeightTransport`. say: told when a server was lost.
    """

    engine_id: str
    dtype: str
    max_running: int
    response_seconds: float
    update_seconds: float
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    say: Callable[[str], None]


class SupervisedSGLang:
    """A `PolicyEngine` on one server at a time.

    Attributes:
        unfinished: rollout ids of the latest `generate` call that yielded no record: aborted before their first token,
            or given up. Ask for them again.
    """

    def __init__(self, source: ServerSource, model: ModelFacts, options: SupervisedOptions, version: int) -> None:
        """Takes the first server.

        Args:
            version: policy version of the weights that the server starts with; -1 where it must wait for an update.

        Raises:
            EngineError: there is no server, or it is not what is needed.
        """
        self._source, self._model, self._options = source, model, options
        self._version = version
        self._held: tuple[int, Mapping[str, Tensor]] | None = None
        self._set = WeightSet(options.shapes, options.tied)
        self._engine: SGLangEngine | None = None
        self._weights: SGLangWeights | None = None
        self._left: Mapping[str, RolloutRequest] = {}
        self._aborted: set[str] = set()
        self.unfinished: list[str] = []
        self._open()

    def handshake(self) -> EngineInfo:
        """What the server says about itself; the version is -1 before the first update.

        Raises:
            EngineError: it does not answer, or lacks something.
        """
        info = self._live.handshake()
        return info if self._version >= 0 else replace(info, policy_version=-1)

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        """Yields one record per request, in the order in which they finish.

        Raises:
            EngineError: at once, where a request is refused or no weights were sent yet; at a later record, where
                `MAX_LOSSES` servers in a row were lost, or one refused a request.
        """
        if self._version < 0:
            raise EngineError(
                f"engine {self._options.engine_id!r}: no weights yet",
                seen="policy version -1",
                expected="a weight update before the first request",
                remedy="publish weights first",
            )
        check_requests(requests, self._model.spec, self._live.facts.report.max_request_tokens - 1)
        return self._generate({request.lineage.rollout_id: request for request in requests})

    def abort(self, rollout_ids: Collection[str] | None = None) -> None:
        """Finishes the named requests (all when None) with what they have; those without a token yield nothing."""
        self._aborted |= set(self._left if rollout_ids is None else rollout_ids)
        self._live.abort(rollout_ids)

    def begin_update(self, version: int) -> None:
        """Starts a weight update; one that was never ended is forgotten."""
        self._set.begin(version)

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps tensors under their checkpoint names until the set is whole."""
        self._set.receive(tensors)

    def end_update(self) -> None:
        """Sends the set, and keeps a copy for a server that takes the place of this one.

        Raises:
            WeightSyncError: the set is not whole: the server keeps its weights. Or no server could be brought to hold
                it.
            EngineError: there was no other server.
        """
        self._held = self._set.take()
        self._version = self._held[0]
        try:
            assert self._weights is not None
            self._weights.send(*self._held)
        except (WeightSyncError, TransportError, KeyRefusedError) as error:
            self._replace(error)

    def close(self) -> None:
        """Leaves the server; one of our own is stopped."""
        if self._weights is not None:
            self._weights.close()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._weights = None
        self._source.close()

    @property
    def _live(self) -> SGLangEngine:
        if self._engine is None:
            raise EngineError(f"engine {self._options.engine_id!r} is closed")
        return self._engine

    def _generate(self, left: dict[str, RolloutRequest]) -> Iterator[RolloutRecord]:
        self._left, self._aborted = left, set()
        try:
            yield from self._answers(left)
        finally:
            self.unfinished = list(left)
            self._left = {}

    def _answers(self, left: dict[str, RolloutRequest]) -> Iterator[RolloutRecord]:
        """Records of `left`, which shrinks; over as many servers as it takes."""
        losses = earlier_attempts = 0
        while left:
            try:
                self._require_current()
                for record in self._live.generate(list(left.values())):
                    del left[record.rollout_id]
                    losses = 0
                    values = {**record.values, "attempt": record.values["attempt"] + earlier_attempts}
                    yield replace(record, values=values)
                return
            except (TransportError, KeyRefusedError, StaleServerError) as error:
                losses += 1
                if losses > MAX_LOSSES:
                    raise
                earlier_attempts += NUM_ATTEMPTS
                self._replace(error)
            for rollout_id in self._aborted & left.keys():
                del left[rollout_id]

    def _require_current(self) -> None:
        """The server holds the weights that it should: whoever restarted it cannot have given it those."""
        seen = self._live.handshake().policy_version
        if seen != self._version:
            raise StaleServerError(
                f"engine {self._options.engine_id!r}: other weights",
                seen=f"policy version {seen}",
                expected=self._version,
                remedy="let nobody else update or restart this server",
            )

    def _replace(self, error: EngineError | WeightSyncError) -> None:
        """From a lost server to one that holds the current weights."""
        self._options.say(f"WARNING: the SGLang server is lost, taking another: {error}")
        self._drop()
        self._open()
        self._options.say(f"SGLang: going on with weights of version {self._version}")

    def _drop(self) -> None:
        if self._weights is not None:
            self._weights.abandon()
        if self._engine is not None:
            with contextlib.suppress(EngineError):
                self._engine.close()
        self._engine = self._weights = None

    def _open(self) -> None:
        options, endpoint = self._options, self._source.open()
        try:
            self._engine = SGLangEngine(
                endpoint,
                self._model,
                engine_id=options.engine_id,
                max_running=options.max_running,
                timeout_seconds=options.response_seconds,
            )
            facts = self._engine.facts
            if facts.dtype.removeprefix("torch.") != options.dtype:
                raise EngineError(
                    "SGLang server: precision",
                    seen=facts.dtype,
                    expected=f"rollout.dtype = {options.dtype}",
                    remedy=f"moerl serve --dtype {options.dtype}, or set rollout.dtype",
                )
            transport = WeightTransport(
                options.shapes,
                options.tied,
                num_ranks=facts.num_ranks,
                backend="gloo" if facts.device == "cpu" else "nccl",
                timeout_seconds=options.update_seconds,
            )
            self._weights = SGLangWeights(endpoint, transport, on_update=self._engine.handshake)
            if self._held is not None:
                self._weights.send(*self._held)
        except BaseException:  # an interrupt, too, leaves no server behind
            self._drop()
            self._source.close()
            raise
