"""SGLang servers under test: those with our patches, and others. Torch-free; in the process of `moerl conformance`.

A server is asked over HTTP only. One with our patches says in its handshake what it is; of others the caller says which
model they serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from moerl.errors import EngineError
from moerl.rollout.conformance.subject import AcrossUpdate, Answer, Ask, CannotAskError, SubjectFacts
from moerl.rollout.fleet.backend import new_request_id
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.sglang.handshake import ContractReport
from moerl.rollout.sglang.http import SGLangHttp

NO_KEY = "none"
"""Stands for a key of a server that asks for none."""

_MAX_CONNECTIONS = 128
_CALL_SECONDS = 60.0

Update = Callable[[Sequence[Ask]], AcrossUpdate]


@dataclass(frozen=True, slots=True)
class ServerSays:
    """Facts that a server reports about itself, with our patches or without."""

    dtype: str
    """Dtype of weights and activations, under torch's name."""
    report: ContractReport | None
    """Report of our patches; None without them."""
    pool_tokens: int | None
    """Tokens of its key-value pool; None if it does not say."""
    context_tokens: int | None
    """Longest input or context; None if it does not say."""
    release: str
    """Release of SGLang."""
    model_path: str
    """Path of the model that it loaded, on its machine; empty if it does not say."""
    policy_version: str
    """Label of its weights; empty if it does not say."""
    takes_seeds: bool
    """True if it was started with `--enable-deterministic-inference`."""


class Dialect(Protocol):
    """Form of requests to one kind of server, and of its answers."""

    def body(self, ask: Ask, request_id: str) -> Mapping[str, Any]:
        """Returns the body of a request to `/generate`."""
        ...

    def max_bytes(self, ask: Ask) -> int:
        """Returns the length of the longest possible answer to a request."""
        ...

    def read(self, ask: Ask, content: bytes) -> Answer | None:
        """Reads an answer; returns None if an aborted request has no token. Raises ContractError if it cannot be
        read."""
        ...


class ServerSubject:
    """A `Subject` behind an address.

    Args:
        endpoint: its admin key is empty if the caller has none.
        seconds: longest time to an answer.
        update: replaces weights while requests are under way; None if nobody may.
    """

    def __init__(
        self, endpoint: Endpoint, facts: SubjectFacts, dialect: Dialect, *, seconds: float, update: Update | None
    ) -> None:
        self._endpoint, self.facts, self._dialect = endpoint, facts, dialect
        self._seconds, self._update = seconds, update

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        answers = over_http(self._endpoint, self._seconds, lambda http: self._all(http, asks))
        lost = next((number for number, answer in enumerate(answers) if answer is None), None)
        if lost is not None:
            raise EngineError(f"request {lost} was answered without a token", expected="an answer")
        return [answer for answer in answers if answer is not None]

    def abort_midway(self, asks: Sequence[Ask]) -> list[Answer | None]:
        if not self._endpoint.admin_key:
            raise CannotAskError("aborts need the admin key: give the server's server.json")
        return over_http(self._endpoint, self._seconds, lambda http: self._cut(http, asks))

    def across_update(self, asks: Sequence[Ask]) -> AcrossUpdate:
        if self._update is None:
            raise CannotAskError("weights of this server cannot be replaced: it needs our patches and its admin key")
        return self._update(asks)

    def close(self) -> None:
        """Does nothing: the server goes on."""

    async def _all(self, http: SGLangHttp, asks: Sequence[Ask]) -> list[Answer | None]:
        return await asyncio.gather(*(self._one(http, ask, new_request_id("ask")) for ask in asks))

    async def _cut(self, http: SGLangHttp, asks: Sequence[Ask]) -> list[Answer | None]:
        ids = [new_request_id("ask") for _ in asks]
        async with asyncio.TaskGroup() as group:
            first, *others = [
                group.create_task(self._one(http, ask, name)) for ask, name in zip(asks, ids, strict=True)
            ]
            await first
            await asyncio.gather(*(http.admin("/abort_request", {"rid": name}) for name in ids[1:]))
        return [await task for task in (first, *others)]

    async def _one(self, http: SGLangHttp, ask: Ask, request_id: str) -> Answer | None:
        body, limit = self._dialect.body(ask, request_id), self._dialect.max_bytes(ask)
        return self._dialect.read(ask, await http.call_once("/generate", body, limit, self._seconds))


def over_http[T](endpoint: Endpoint, seconds: float, ask: Callable[[SGLangHttp], Coroutine[Any, Any, T]]) -> T:
    """Makes calls to a server in an event loop of their own; returns their result. Raises EngineError if one fails."""

    async def run() -> T:
        known = replace(endpoint, api_key=endpoint.api_key or NO_KEY)
        http = SGLangHttp(known, max_connections=_MAX_CONNECTIONS, timeout_seconds=seconds)
        try:
            return await ask(http)
        finally:
            await http.close()

    try:
        return asyncio.run(run())
    except ExceptionGroup as group:
        errors = group.exceptions
        raise errors[0] from group


def look_at(endpoint: Endpoint) -> ServerSays:
    """Asks a server what it is.

    Raises:
        EngineError: it does not answer, or is no SGLang server.
    """

    async def ask(http: SGLangHttp) -> tuple[dict[str, Any], dict[str, Any]]:
        return await asyncio.gather(http.get("/server_info"), http.get("/model_info"))

    info, model = over_http(endpoint, _CALL_SECONDS, ask)
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    contract = state.get("contract")
    try:
        return ServerSays(
            dtype=str(info.get("dtype")).removeprefix("torch."),
            report=None if contract is None else msgspec.convert(contract, ContractReport),
            pool_tokens=_whole(info.get("max_total_num_tokens")),
            context_tokens=_whole(info.get("max_req_input_len") or info.get("context_length")),
            release=str(info.get("version", "without a version")),
            model_path=str(model.get("model_path", "")),
            policy_version=str(model.get("weight_version", "")),
            takes_seeds=bool(info.get("enable_deterministic_inference")),
        )
    except (ValueError, TypeError) as error:
        raise EngineError(
            f"{endpoint.url}: /server_info", seen=f"{type(error).__name__}: {error}", expected="an SGLang server"
        ) from error


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
