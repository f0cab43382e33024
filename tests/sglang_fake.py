"""A server that answers like a patched SGLang server, or as badly as a test asks; no model, no SGLang."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np
import zstandard
from fleet_fake import FakeLauncher

from moerl.contract.array_codec import pack_kept_ids
from moerl.contract.trajectory import MAX_KEPT_IDS, ModelSpec
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.sglang.backend import SGLangConnect
from moerl.rollout.sglang.many_answers import HEAD, PATH
from moerl.rollout.sglang.patches import DEFAULT_RELEASE, read_patches

SPEC = ModelSpec(num_moe_layers=2, experts_per_token=2, num_experts=8, vocab_size=50, fingerprint="fake")
MOE_LAYERS = (1, 3)
MODEL = ModelFacts(SPEC, MOE_LAYERS)
Answer = tuple[int, bytes]


def contract_report(**changes: Any) -> dict[str, Any]:
    report = {
        "fingerprint": read_patches().fingerprint,
        "compact_schema": 1,
        "vocab_size": 50,
        "max_request_tokens": 100,
        "moe_layers": list(MOE_LAYERS),
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ids": "logical",
        "expert_bytes": 1,
    }
    return report | changes


def server_info(**changes: Any) -> dict[str, Any]:
    info = {
        "version": DEFAULT_RELEASE,
        "internal_states": [{"contract": contract_report()}],
        "sampling_backend": "pytorch",
        "sampling_mask_max_tokens": MAX_KEPT_IDS,
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
        "enable_eplb": False,
        "ep_num_redundant_experts": 0,
        "init_expert_location": "trivial",
        "ep_dispatch_algorithm": None,
        "tp_size": 1,
        "device": "cpu",
        "dtype": "float32",
    }
    return info | changes


def of_release(release: str) -> dict[str, Any]:
    """Returns the server info of a patched server of a release."""
    report = contract_report(fingerprint=read_patches(release).fingerprint)
    return server_info(version=release, internal_states=[{"contract": report}])


def compact(fields: Mapping[str, Any]) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(msgspec.msgpack.encode(dict(fields)))


def compact_fields(num_prompt: int, count: int, *, cuts: bool) -> dict[str, Any]:
    """A valid answer of `count` tokens; token t is t + 1, kept with its neighbour t + 2."""
    ids = np.arange(1, count + 1, dtype="<i4")
    kept = np.stack([ids, ids + 1], 1).reshape(-1).astype(np.int32)
    num_rows = num_prompt + count - 1
    experts = np.tile(np.array([1, 5], np.uint8), (2, num_rows, 1))
    return {
        "schema": 1,
        "output_ids": ids.tobytes(),
        "logprobs": np.full(count, -1.5, "<f4").tobytes(),
        "kept_logprobs": np.full(count if cuts else 0, -0.5, "<f4").tobytes(),
        "kept_sizes": np.full(count if cuts else 0, 2, "<u4").tobytes(),
        "kept_ids": bytes(pack_kept_ids(np.arange(0, 2 * count + 1, 2), kept)) if cuts else b"",
        "num_rows": num_rows,
        "expert_ids": experts.tobytes(),
    }


def reply(body: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The answer to a `/generate` body, of the length asked for."""
    count = body["sampling_params"]["max_new_tokens"]
    fields = compact_fields(len(body["input_ids"]), count, cuts=body["return_sampling_mask"])
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": count},
        "weight_versions": [{"version": "3", "start": 0, "end": count}],
        "compact_answer": compact(fields),
        "cached_tokens": 0,
    }
    return {"output_ids": [], "meta_info": meta | changes}


class _ManyAtOnce(ThreadingHTTPServer):
    request_queue_size = 256
    num_connections = 0

    def get_request(self) -> tuple[Any, Any]:
        self.num_connections += 1
        return super().get_request()


class FakeServer:
    """Listens on loopback; `answer` may be replaced by a test.

    calls: how many requests each `/generate_many` had. spoil: from the place of a request and its frame to the bytes
    that are sent instead. left: clients that left before they had all answers of a call.
    bodies: of all requests for rollouts, in order. probes: of those for a probe, which fail where
    `answers_probes` is False. steps: paths of the calls of weight updates; `refuses` is one that fails. frozen: how
    often it was told that what it consists of is no garbage.
    encoding: the content encoding that answers claim to have. accepted: those that clients said to accept.
    """

    def __init__(self) -> None:
        self.probes: list[dict[str, Any]] = []
        self.answers_probes = True
        self.steps: list[str] = []
        self.refuses = ""
        self.frozen = 0
        self.info = server_info()
        self.encoding = ""
        self.accepted: set[str] = set()
        self.weight_version = "3"
        self.calls: list[int] = []
        self.spoil: Callable[[int, bytes], bytes] = lambda place, frame: frame
        self.left = 0
        self.bodies: list[dict[str, Any]] = []
        self.admin_calls: list[tuple[str, dict[str, Any]]] = []
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: (200, msgspec.msgpack.encode(reply(body)))
        self._http = _ManyAtOnce(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        # A client that gives up closes its connection; that is what tests ask for.
        self._http.handle_error = lambda request, client_address: None  # pyright: ignore[reportAttributeAccessIssue]
        self.endpoint = Endpoint(f"http://127.0.0.1:{self._http.server_address[1]}", "key", "admin")
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """That clients have opened."""
        return self._http.num_connections

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def respond(self, path: str, key: str, body: dict[str, Any]) -> Answer:
        if path == "/health":
            return 200, b""
        is_admin = path not in ("/generate", PATH, "/server_info", "/model_info")
        if key != (self.endpoint.admin_key if is_admin else self.endpoint.api_key):
            return 401, b'{"error": "Unauthorized"}'
        if path == PATH:
            return 200, b""  # its answers come one by one
        if path == "/generate" and body["rid"].endswith("-probe"):
            self.probes.append(body)
            return (200, msgspec.msgpack.encode(reply(body))) if self.answers_probes else (0, b"")
        if path == "/generate":
            self.bodies.append(body)
            return self.answer(body)
        if path == "/freeze_gc":
            self.frozen += 1
            return 200, b""
        if is_admin:
            self.steps.append(path)
            if path == self.refuses:
                return 400, b"refused"
            if path == "/update_weight_version":
                self.weight_version = body["new_version"]
            self.admin_calls.append((path, body))
            return 200, b""
        return 200, json.dumps(
            self.info if path == "/server_info" else {"weight_version": self.weight_version}
        ).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(*fake.respond(self.path, self._key(), {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, content = fake.respond(self.path, self._key(), body)
                if self.path == PATH and (status, content) == (200, b""):
                    self._send_each(body)
                else:
                    self._send(status, content)

            def _send_each(self, bodies: list[dict[str, Any]]) -> None:
                fake.calls.append(len(bodies))
                key, turn = self._key(), threading.Lock()
                self._begin(200, "Transfer-Encoding", "chunked")

                def send(place: int, body: dict[str, Any]) -> None:
                    status, content = fake.respond("/generate", key, body)
                    frame = fake.spoil(place, HEAD.pack(place, status, len(content)) + content)
                    with turn:
                        if status == 0:  # hang up without an answer
                            self.connection.shutdown(socket.SHUT_RDWR)
                        else:
                            self.wfile.write(b"%x\r\n%b\r\n" % (len(frame), frame))

                with ThreadPoolExecutor(len(bodies)) as threads:
                    sent = [threads.submit(send, place, body) for place, body in enumerate(bodies)]
                if any(each.exception() for each in sent):
                    fake.left += 1
                    self.close_connection = True
                    return
                self.wfile.write(b"0\r\n\r\n")

            def _key(self) -> str:
                return self.headers.get("Authorization", "").removeprefix("Bearer ")

            def _send(self, status: int, content: bytes) -> None:
                if status == 0:  # hang up without an answer
                    self.close_connection = True
                    return
                self._begin(status, "Content-Length", str(len(content)))
                self.wfile.write(content)

            def _begin(self, status: int, name: str, value: str) -> None:
                fake.accepted.add(self.headers.get("Accept-Encoding", ""))
                self.send_response(status)
                self.send_header(name, value)
                if fake.encoding:
                    self.send_header("Content-Encoding", fake.encoding)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        return Handler


def connect(
    *launchers: FakeLauncher | FakeServer, version: int = 3, said: list[str] | None = None, **changes: Any
) -> FleetEngine:
    """An engine on fake servers. changes: of `EngineOptions`."""
    options: dict[str, Any] = {
        "engine_id": "e",
        "dtype": "float32",
        "max_running": 4,
        "response_seconds": 30.0,
        "probe_seconds": 30.0,
        "update_seconds": 5.0,
        "bucket_bytes": 1 << 20,
        "shapes": {},
        "tied": {},
        "notify": ([] if said is None else said).append,
    }
    made = [launcher if isinstance(launcher, FakeLauncher) else FakeLauncher(launcher) for launcher in launchers]
    settings = EngineOptions(**options | changes)
    return FleetEngine(made, SGLangConnect(MODEL, settings), MODEL, settings, version)
