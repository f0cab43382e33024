"""The client side of an SGLang server, behind the rollout port.

Runs inside the process that asks for rollouts: `generate` is an ordinary iterator, the calls to the server are made by
an event loop in a thread of their own. Tokens go in and come out as ids; the server has no tokenizer. Every request
carries its own seed, and a prefix-cache key of the weights' version: entries of other weights are never hit.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moerl.contract.ports import EngineInfo, ReportedLayers, RolloutRecord, RolloutRequest
from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.errors import ContractError, EngineError
from moerl.rollout.requests import check_requests
from moerl.rollout.sglang.answers import (
    CompactAnswer,
    decode_compact,
    finish_reason,
    num_sampled,
    trajectory_values,
    version_spans,
)
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.handshake import ServerFacts, check_model, check_options, check_patches, read_facts
from moerl.rollout.sglang.http import NUM_ATTEMPTS, SGLangHttp, TransportError, backoff
from moerl.rollout.sglang.patches import read_patches


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the trainer's model is. moe_layers: indices of its MoE layers among its decoder layers."""

    spec: ModelSpec
    moe_layers: tuple[int, ...]


@dataclass(slots=True)
class _Run:
    """State of one `generate` call; touched by the event loop's thread, but for `requests`.

    request_ids: by rollout id, of the attempt that the server works on.
    """

    requests: dict[str, RolloutRequest]
    outcomes: queue.SimpleQueue[RolloutRecord | None] = field(default_factory=queue.SimpleQueue)
    request_ids: dict[str, str] = field(default_factory=dict)
    aborted_ids: set[str] = field(default_factory=set)
    asked_at: float = field(default_factory=time.perf_counter)


class SGLangEngine:
    """A `RolloutEngine` around one server.

    Attributes:
        unfinished: rollout ids of the latest `generate` call that yielded no record: aborted before their first token,
            or given up. Ask for them again.
    """

    def __init__(
        self, endpoint: Endpoint, model: ModelFacts, *, engine_id: str, max_running: int, timeout_seconds: float
    ) -> None:
        """Connects, and compares what the server says about itself with what is needed.

        Args:
            max_running: requests that are with the server at the same time.
            timeout_seconds: longest time from asking for a response to having it.

        Raises:
            EngineError: the server cannot be reached or lacks something; the message names it.
        """
        self._model = model
        self._engine_id = engine_id
        self._max_running = max_running
        self._run: _Run | None = None
        self.unfinished: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{engine_id}-http", daemon=True)
        self._thread.start()
        self._http = SGLangHttp(endpoint, max_connections=max_running, timeout_seconds=timeout_seconds)
        try:
            self._facts = self._shake_hands()
        except EngineError:
            self.close()
            raise

    @property
    def facts(self) -> ServerFacts:
        """What the server said about itself when it was asked last."""
        return self._facts

    def handshake(self) -> EngineInfo:
        """Asks the server again; its weights may have changed.

        Raises:
            EngineError: as at construction.
        """
        self._facts = self._shake_hands()
        report = self._facts.report
        return EngineInfo(
            self._engine_id,
            self._model.spec,
            self._facts.policy_version,
            ReportedLayers.MOE,
            tuple(report.moe_layers),
        )

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        """Yields one record per request, in the order in which they finish.

        Raises:
            EngineError: at once, where a request is refused; at a later record, where the server refused one or gave
                no whole answer to any attempt, or where another `generate` is not finished.
        """
        # The server needs room for one token more than the model does.
        check_requests(requests, self._model.spec, self._facts.report.max_request_tokens - 1)
        return self._generate(_Run({request.lineage.rollout_id: request for request in requests}))

    def abort(self, rollout_ids: Collection[str] | None = None) -> None:
        """Finishes the named rollouts of the current `generate` call (all when None).

        Those with a token yield what they have, with reason `abort`; the others are listed in `unfinished`. From any
        thread; without a call it does nothing.

        Raises:
            EngineError: the server could not be told.
        """
        run = self._run
        if run is not None:
            self._wait(self._abort(run, set(run.requests if rollout_ids is None else rollout_ids)))

    def close(self) -> None:
        """Gives up what is under way and closes the connections. The server keeps running."""
        if not self._thread.is_alive():
            return
        self._wait(self._http.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the event loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _shake_hands(self) -> ServerFacts:
        return self._wait(ask_facts(self._http, self._model))

    def _generate(self, run: _Run) -> Iterator[RolloutRecord]:
        if self._run is not None:
            raise EngineError(
                f"engine {self._engine_id!r}: already generating",
                expected="one generate call at a time",
                remedy="exhaust or close the first iterator",
            )
        self._run = run
        left = dict.fromkeys(run.requests)
        work = asyncio.run_coroutine_threadsafe(self._serve(run), self._loop)
        work.add_done_callback(lambda done: run.outcomes.put(None))
        try:
            while (record := run.outcomes.get()) is not None:
                del left[record.rollout_id]
                yield record
            _raise_first(work.exception())
        finally:
            work.cancel()
            self.unfinished = list(left)
            self._run = None

    async def _serve(self, run: _Run) -> None:
        slots = asyncio.Semaphore(self._max_running)
        async with asyncio.TaskGroup() as tasks:
            for request in run.requests.values():
                tasks.create_task(self._answer(run, request, slots))

    async def _answer(self, run: _Run, request: RolloutRequest, slots: asyncio.Semaphore) -> None:
        rollout_id = request.lineage.rollout_id
        async with slots:
            admitted_at = time.perf_counter()
            for attempt in range(NUM_ATTEMPTS):
                if rollout_id in run.aborted_ids:
                    return
                is_last = attempt + 1 == NUM_ATTEMPTS
                try:
                    meta = await self._ask(run, request)
                except TransportError:
                    if is_last:
                        raise
                    await backoff(attempt)
                    continue
                finally:
                    run.request_ids.pop(rollout_id, None)
                values, refusal = self._read(request, meta)
                if refusal is not None and not is_last:
                    # A damaged answer is asked for again, under the same rollout id.
                    await backoff(attempt)
                    continue
                if values is not None:
                    waited, sampled = admitted_at - run.asked_at, time.perf_counter() - admitted_at
                    timings = {"waiting_seconds": waited, "sampling_seconds": sampled}
                    values |= {"engine_id": self._engine_id, "attempt": attempt, "timings": timings}
                    version = self._facts.policy_version
                    run.outcomes.put(RolloutRecord(rollout_id, self._engine_id, version, values, refusal))
                return

    async def _ask(self, run: _Run, request: RolloutRequest) -> dict[str, Any]:
        """The `meta_info` of the answer to one attempt."""
        # Aborts match prefixes of ids: what comes first must be unique and of one length.
        request_id = f"{secrets.token_hex(8)}-{request.lineage.rollout_id}"
        run.request_ids[request.lineage.rollout_id] = request_id
        body = request_body(request, request_id, self._facts.policy_version)
        reply = await self._http.post_once("/generate", body)
        meta = reply.get("meta_info")
        if not isinstance(meta, dict) or meta.get("id") != request_id:
            seen = meta.get("id") if isinstance(meta, dict) else type(meta).__name__
            raise TransportError("SGLang /generate: an answer to another request", seen=seen, expected=request_id)
        return meta

    def _read(
        self, request: RolloutRequest, meta: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, ContractError | None]:
        """The trajectory's fields; None where the request was aborted before its first token. Of an answer that cannot
        be read what arrived, and why."""
        try:
            reason = finish_reason(meta)
            if reason == FinishReason.ABORT and "compact_answer" not in meta:
                return None, None
            answer = decode_compact(meta.get("compact_answer"))
            if num_sampled(answer) == 0:
                return None, None
            _check_length(request, answer, reason)
            return trajectory_values(request, answer, version_spans(meta), reason, self._model.spec), None
        except ContractError as error:
            return {"lineage": request.lineage, "meta_info": meta}, error

    async def _abort(self, run: _Run, rollout_ids: set[str]) -> None:
        run.aborted_ids |= rollout_ids
        request_ids = [run.request_ids[name] for name in rollout_ids if name in run.request_ids]
        await asyncio.gather(*(self._http.admin("/abort_request", {"rid": name}) for name in request_ids))


async def ask_facts(http: SGLangHttp, model: ModelFacts | None) -> ServerFacts:
    """The handshake: what the server is, compared with this version's patches and with `model` where it is given.

    Raises:
        EngineError: something is missing; the message names it.
    """
    info = await http.get("/server_info")
    weights = await http.get("/model_info")
    facts = read_facts(info, str(weights.get("weight_version")))
    check_patches(facts, read_patches().fingerprint)
    check_options(facts)
    if model is not None:
        check_model(facts, model.spec, model.moe_layers)
    return facts


def request_body(request: RolloutRequest, request_id: str, policy_version: int) -> dict[str, Any]:
    """The JSON body of `/generate`; the answer is msgpack."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        # The model's own end-of-sequence ids do not count, only those of the request.
        "ignore_eos": True,
        "stop_token_ids": list(request.stop_ids),
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed,
    }
    if not sampling.is_greedy:
        params |= {"top_p": sampling.top_p, "min_p": sampling.min_p, "top_k": sampling.effective_top_k or -1}
    return {
        "rid": request_id,
        "input_ids": list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": True,
        "return_sampling_mask": sampling.cuts,
        "compact_answer": True,
        "extra_key": f"weights-{policy_version}",
    }


def _raise_first(error: BaseException | None) -> None:
    """Raises the first error of a task group, if there is one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error


def _check_length(request: RolloutRequest, answer: CompactAnswer, reason: FinishReason) -> None:
    """A response that is shorter than asked for is no response of that length."""
    count = num_sampled(answer)
    if count > request.max_new_tokens or (reason == FinishReason.LENGTH and count != request.max_new_tokens):
        raise EngineError(
            f"rollout {request.lineage.rollout_id!r}: length of the response",
            seen=f"{count} tokens, reason {reason}",
            expected=f"{request.max_new_tokens} tokens, or a stop token",
            remedy="give the server a longer context or a larger KV pool",
        )
