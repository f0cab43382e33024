"""Calls to a live server that the engine would not make: the raw answer, other fields, other requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import ModelSpec, Trajectory
from moerl.rollout.fleet.backend import ModelFacts, ServerLauncher
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.segments import trajectory_values
from moerl.rollout.sglang.answers import decode_compact, finish_reason, read_segment, version_spans
from moerl.rollout.sglang.backend import SGLangConnect
from moerl.rollout.sglang.client import answer_bounds, request_body
from moerl.rollout.sglang.digests import ServedModel, weight_digests, weight_dtypes
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.launchers import OwnServer
from moerl.rollout.sglang.server import ServerOptions, SGLangServer

ENVIRONMENT = Path(os.environ.get("MOERL_SGLANG_ENV", Path(__file__).parents[1] / ".venv-sglang")).absolute()
"""Folder in which `make sglang` makes the servers' environment, of whichever release."""

START_SECONDS = 500.0
"""Far more than a server takes on a busy machine."""

DEEPSEEK_PUBLISHED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Fields of DeepSeek's published configurations that the class of transformers lacks; SGLang needs them."""


@contextmanager
def running(options: ServerOptions, folder: Path) -> Iterator[SGLangServer]:
    """A server that is ready."""
    launcher = OwnServer(options, folder, START_SECONDS)
    launcher.open()
    assert launcher.server is not None
    try:
        yield launcher.server
    finally:
        launcher.server.stop()


def post(endpoint: Endpoint, path: str, body: Mapping[str, Any], *, key: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"}
    return httpx.post(f"{endpoint.url}{path}", json=dict(body), headers=headers, timeout=300.0, trust_env=False)


def over_http[T](
    endpoint: Endpoint, ask: Callable[[SGLangHttp], Coroutine[Any, Any, T]], *, max_connections: int = 1
) -> T:
    """Calls a server through our client and returns the answer."""

    async def run() -> T:
        http = SGLangHttp(endpoint, max_connections=max_connections, timeout_seconds=60.0)
        try:
            return await ask(http)
        finally:
            await http.close()

    return asyncio.run(run())


def digests(endpoint: Endpoint, model: ServedModel) -> dict[str, int]:
    return over_http(endpoint, lambda http: weight_digests(http, model, 60.0))


def dtypes(endpoint: Endpoint, model: ServedModel) -> dict[str, str]:
    return over_http(endpoint, lambda http: weight_dtypes(http, model, 60.0))


def generate(endpoint: Endpoint, requests: Sequence[RolloutRequest], **changes: Any) -> list[dict[str, Any]]:
    """The answers, all asked at once; `changes` go into every body."""

    def ask(numbered: tuple[int, RolloutRequest]) -> dict[str, Any]:
        number, request = numbered
        body = request_body(request, f"{number:08d}-{request.lineage.rollout_id}", 0) | changes
        response = post(endpoint, "/generate", body)
        assert response.status_code == 200, response.text
        is_json = response.headers["content-type"].startswith("application/json")
        return response.json() if is_json else msgspec.msgpack.decode(response.content)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, enumerate(requests)))


def generate_together(endpoint: Endpoint, requests: Sequence[RolloutRequest]) -> list[dict[str, Any]]:
    """The answers to one call with all requests in it: they reach the scheduler at the same moment."""
    bodies = [request_body(r, f"{number:08d}-{r.lineage.rollout_id}", 0) for number, r in enumerate(requests)]
    listed = ("rid", "input_ids", "sampling_params", "return_sampling_mask")
    body = {name: [single[name] for single in bodies] for name in listed}
    flags = ("return_logprob", "return_routed_experts", "compact_answer")
    response = post(endpoint, "/generate", body | dict.fromkeys(flags, True))
    assert response.status_code == 200, response.text
    return msgspec.msgpack.decode(response.content)


def trajectory(request: RolloutRequest, reply: Mapping[str, Any], spec: ModelSpec) -> Trajectory:
    meta = reply["meta_info"]
    answer = decode_compact(meta["compact_answer"], answer_bounds(request, 0, spec).payload_bytes)
    segment = read_segment(request, answer, version_spans(meta), 0, spec)
    return Trajectory(**trajectory_values(request, [segment], finish_reason(meta), spec))


@dataclass(frozen=True)
class GivenServer:
    """A launcher of one server that tests share."""

    endpoint: Endpoint

    def open(self) -> Endpoint:
        return self.endpoint

    def close(self) -> None:
        """The server goes on."""


def connect(*servers: Endpoint | ServerLauncher, model: ModelFacts, version: int = 0, **changes: Any) -> FleetEngine:
    """An engine on running servers, or on launchers of them. changes: of `EngineOptions`."""
    options: dict[str, Any] = {
        "engine_id": "sglang",
        "dtype": "float32",
        "max_running": 16,
        "response_seconds": 120.0,
        "probe_seconds": 60.0,
        "update_seconds": 60.0,
        "bucket_bytes": 1 << 28,
        "shapes": {},
        "tied": {},
        "notify": print,
    }
    launchers = [GivenServer(server) if isinstance(server, Endpoint) else server for server in servers]
    settings = EngineOptions(**options | changes)
    return FleetEngine(launchers, SGLangConnect(model, settings), model, settings, version)
