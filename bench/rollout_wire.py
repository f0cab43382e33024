"""One live server, the same requests: upstream's answer fields against the compact field, in bytes and client CPU.

A tiny model with the shapes that decide the size of an answer: 48 MoE layers, top-8 of 128 experts; top-p 0.95 with
top-k 20. It runs on CPU, in the environment that `moerl sglang install --device cpu` makes (`--env DIR`). Bytes are
those of whole HTTP bodies per token of a trajectory. CPU is this process's, from the body to arrays of the data
contract; fetching the body costs both the same per byte and is left out.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from _report import Result, report
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, ModelSpec, SamplingParams
from moerl.http.client import BlockingClient, Request, excerpt_of
from moerl.http.keys import Key
from moerl.models.spec import spec_from_hf_config
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.segments import trajectory_values
from moerl.rollout.sglang.answers import decode_compact, finish_reason, read_segment, version_spans
from moerl.rollout.sglang.client import answer_bounds, request_body
from moerl.rollout.sglang.server import ServerOptions, SGLangServer

NUM_PROMPT, NUM_NEW, NUM_REQUESTS, REPEATS = 64, 192, 8, 5
START_SECONDS = 600.0
MAX_ANSWER_BYTES = 1 << 28


def write_model(folder: Path) -> ModelSpec:
    """A random model with wide distributions in answers, and narrow ones elsewhere."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32_768,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,  # pyright: ignore[reportCallIssue]  (read from keyword arguments)
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=8,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return spec_from_hf_config(config.to_dict())


def make_requests(spec: ModelSpec) -> list[RolloutRequest]:
    rng = np.random.default_rng(0)
    return [
        RolloutRequest(
            Lineage(f"r{i}", "p", "g"),
            tuple(rng.integers(0, spec.vocab_size, NUM_PROMPT).tolist()),
            SamplingParams(top_p=0.95, top_k=20, seed=i),
            NUM_NEW,
        )
        for i in range(NUM_REQUESTS)
    ]


def ask(endpoint: Endpoint, requests: list[RolloutRequest], *, compact: bool) -> list[bytes]:
    """The bodies of the answers; asked for all at once."""
    client, key = BlockingClient(max_connections=len(requests)), Key(endpoint.api_key)

    def one(numbered: tuple[int, RolloutRequest]) -> bytes:
        number, request = numbered
        body = request_body(request, f"{compact:d}{number:08d}", 0) | {"compact_answer": compact}
        asked = Request("POST", f"{endpoint.url}/generate", msgspec.json.encode(body), key)
        answer = client.ask(asked, MAX_ANSWER_BYTES, START_SECONDS)
        if answer.status != 200:
            raise SystemExit(f"the server refused: status {answer.status}, {excerpt_of(answer.content, key)}")
        return answer.content

    with closing(client), ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, enumerate(requests)))


def read_compact(body: bytes, request: RolloutRequest, spec: ModelSpec) -> dict[str, Any]:
    """The fields of the data contract from the compact field."""
    meta = msgspec.msgpack.decode(body)["meta_info"]
    answer = decode_compact(meta["compact_answer"], answer_bounds(request, 0, spec).payload_bytes)
    segment = read_segment(request, answer, version_spans(meta), 0, spec)
    return trajectory_values(request, [segment], finish_reason(meta), spec)


def read_upstream(body: bytes, request: RolloutRequest, spec: ModelSpec) -> dict[str, Any]:
    """The same fields from upstream's, by the shortest way that numpy offers."""
    reply = json.loads(body)
    meta = reply["meta_info"]
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    sets = meta["output_token_sampling_mask"]
    kept_logprobs = np.array(meta["output_token_sampling_logprobs"], np.float32)
    return {
        "token_ids": np.array([*request.prompt_ids, *reply["output_ids"]], np.int32),
        "rollout_logprobs": kept_logprobs,
        "kept_logmass": np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32) - kept_logprobs,
        "expert_ids": rows.reshape(-1, spec.num_moe_layers, spec.experts_per_token).astype(np.uint8),
        "kept_offsets": np.cumsum([0, *map(len, sets)]),
        "kept_ids": np.concatenate([np.sort(np.array(ids, np.int32)) for ids in sets]),
    }


def cpu_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Median and spread over repeats."""
    work()
    taken = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return sorted(taken)[REPEATS // 2], max(taken) - min(taken)


def measure(environment: Path) -> list[Result]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        spec = write_model(Path(folder) / "model")
        requests = make_requests(spec)
        options = ServerOptions(
            Path(folder) / "model", environment, device="cpu", dtype="float32", max_pool_tokens=8192
        )
        with SGLangServer(options, Path(folder) / "server") as server:
            server.wait_until_ready(START_SECONDS)
            upstream = ask(server.endpoint, requests, compact=False)
            compact = ask(server.endpoint, requests, compact=True)
    num_tokens = NUM_REQUESTS * (NUM_PROMPT + NUM_NEW)
    old_bytes, new_bytes = (sum(map(len, bodies)) / num_tokens for bodies in (upstream, compact))
    pairs = list(zip(compact, requests, strict=True))
    old_pairs = list(zip(upstream, requests, strict=True))
    old_cpu, old_spread = cpu_seconds(lambda: [read_upstream(body, request, spec) for body, request in old_pairs])
    new_cpu, new_spread = cpu_seconds(lambda: [read_compact(body, request, spec) for body, request in pairs])
    per_thousand = 1e6 / num_tokens
    byte_ratio, cpu_ratio = new_bytes / old_bytes, new_cpu / old_cpu
    return [
        Result("bytes per token, upstream's fields", old_bytes, unit="B"),
        Result("bytes per token, compact field", new_bytes, unit="B"),
        Result("bytes, compact against upstream", byte_ratio, "<= 0.2", byte_ratio <= 0.2, "x"),
        Result(
            "client CPU per 1,000 tokens, upstream's fields",
            old_cpu * per_thousand,
            unit="ms",
            spread=old_spread * per_thousand,
        ),
        Result(
            "client CPU per 1,000 tokens, compact field",
            new_cpu * per_thousand,
            unit="ms",
            spread=new_spread * per_thousand,
        ),
        Result("client CPU, compact against upstream", cpu_ratio, "<= 0.2", cpu_ratio <= 0.2, "x"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results here")
    parser.add_argument(
        "--env", type=Path, default=Path(".venv-sglang"), metavar="DIR", help="environment of the server"
    )
    arguments = parser.parse_args()
    report(measure(arguments.env), arguments.json)


if __name__ == "__main__":
    main()
