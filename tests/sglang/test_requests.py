"""Requests to a live server: seeds, aborts, keys, fields. Promises of any engine: `tests/conformance`."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import sglang_live
import torch
from sglang_reference import collect, make_requests
from transformers import AutoModelForCausalLM

from moerl.contract.trajectory import FinishReason, SamplingParams, Trajectory
from moerl.errors import EngineError
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.sglang.answers import decode_compact
from moerl.rollout.sglang.client import request_body
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.install import site_packages
from moerl.rollout.sglang.many_answers import ManyAnswers
from moerl.rollout.sglang.patches import verify_installation
from moerl.rollout.sglang.server import SGLangServer

pytestmark = pytest.mark.sglang


def test_the_handshake_tells_spec_and_version(engine: FleetEngine, model: ModelFacts):
    info = engine.handshake()
    assert (info.spec, info.policy_version, info.engine_id) == (model.spec, 0, "sglang")


def test_both_engines_draw_the_same_tokens_from_the_same_seeds(engine: FleetEngine, model: ModelFacts, model_folder):
    torch_model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    embedded = EmbeddedEngine(torch_model, model.spec, engine_id="embedded-0", max_running=8, policy_version=0)
    requests = make_requests(24)
    here = {r.rollout_id: Trajectory(**r.values) for r in embedded.generate(requests)}
    there = collect(engine, requests)
    assert here.keys() == there.keys()
    for rollout_id, trajectory in here.items():
        assert trajectory.token_ids.tolist() == there[rollout_id].token_ids.tolist()


def test_requests_as_long_as_the_server_takes_are_answered_in_full(engine: FleetEngine):
    request = make_requests(1, stop_ids=())[0]
    room = engine._fleet.max_request_tokens
    (trajectory,) = collect(engine, [replace(request, max_new_tokens=room - len(request.prompt_ids))]).values()
    assert len(trajectory) == room
    with pytest.raises(EngineError, match="max_new_tokens"):
        engine.generate([replace(request, max_new_tokens=room + 1 - len(request.prompt_ids))])


def test_aborted_requests_keep_what_they_have(engine: FleetEngine):
    short, *requests = [replace(r, max_new_tokens=190, stop_ids=()) for r in make_requests(20)]
    iterator = engine.generate([replace(short, max_new_tokens=5), *requests])
    records = [next(iterator)]
    engine.abort()
    records += iterator
    trajectories = [Trajectory(**record.values) for record in records]
    aborted = [t for t in trajectories if t.finish_reason == FinishReason.ABORT]
    assert aborted
    assert all(0 < t.num_sampled < 190 for t in aborted)
    assert len(records) + len(engine.unfinished) == 20


def test_a_request_aborted_in_the_servers_queue_has_no_record(server: SGLangServer, model: ModelFacts):
    # More than the 64 that the server runs side by side: the others wait there, without a token.
    engine = sglang_live.connect(server.endpoint, model=model, max_running=96)
    short, *requests = [replace(r, prompt_ids=(1, 2), max_new_tokens=190, stop_ids=()) for r in make_requests(96)]
    iterator = engine.generate([replace(short, max_new_tokens=4), *requests])
    records = [next(iterator)]
    engine.abort()
    records += iterator
    engine.close()
    # Aborts come one by one, and each makes room for one of those that wait: how many are left is not known.
    assert all(record.values["sampled"].any() for record in records)
    assert len(records) + len(engine.unfinished) == 96


def test_a_wrong_key_is_named_and_the_admin_key_guards_what_changes_a_server(server: SGLangServer, model: ModelFacts):
    wrong = replace(server.endpoint, api_key="wrong")
    with pytest.raises(EngineError, match="does not know our key"):
        sglang_live.connect(wrong, model=model)
    for path in ("/pause_generation", "/flush_cache", "/abort_request", "/begin_weight_update"):
        assert sglang_live.post(server.endpoint, path, {"rid": "none"}).status_code == 401


def test_a_server_of_another_model_is_refused(server: SGLangServer, model: ModelFacts):
    other = ModelFacts(replace(model.spec, num_moe_layers=3), (0, 2, 3))
    with pytest.raises(EngineError, match="MoE layers"):
        sglang_live.connect(server.endpoint, model=other)


def test_the_compact_field_says_what_the_old_fields_say(server: SGLangServer):
    requests = [
        replace(r, sampling=SamplingParams(top_p=0.9, top_k=20, seed=i)) for i, r in enumerate(make_requests(6))
    ]
    old = sglang_live.generate(server.endpoint, requests, compact_answer=False)
    new = sglang_live.generate(server.endpoint, requests)
    for one, other in zip(old, new, strict=True):
        answer = decode_compact(other["meta_info"]["compact_answer"], 1 << 20)
        meta = one["meta_info"]
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, 4, 2)
        planes = np.frombuffer(answer.expert_ids, np.uint8).reshape(4, -1, 2)
        assert np.array_equal(rows.swapaxes(0, 1), planes)
        assert np.frombuffer(answer.output_ids, "<i4").tolist() == one["output_ids"] == other["output_ids"]
        assert np.allclose(np.frombuffer(answer.logprobs, "<f4"), [x[0] for x in meta["output_token_logprobs"]], atol=0)
        kept = meta["output_token_sampling_logprobs"]
        assert np.allclose(np.frombuffer(answer.kept_logprobs, "<f4"), kept, atol=0)
        sizes = np.frombuffer(answer.kept_sizes, "<u4").tolist()
        assert sizes == [len(ids) for ids in meta["output_token_sampling_mask"]]
        assert set(other["meta_info"]).isdisjoint(
            {"routed_experts", "output_token_logprobs", "output_token_sampling_mask"}
        )


def test_requests_of_one_call_are_answered_as_each_by_itself(server: SGLangServer):
    requests = [
        replace(r, sampling=SamplingParams(top_p=0.9, seed=i), max_new_tokens=5 + 20 * (i % 3))
        for i, r in enumerate(make_requests(12))
    ]
    bodies = [request_body(request, f"many-{i}", 0) for i, request in enumerate(requests)]
    bodies[4]["sampling_params"]["max_new_tokens"] = 1 << 20

    async def ask(http: SGLangHttp) -> tuple[list[bytes | BaseException], list[bytes]]:
        answers = ManyAnswers(http, 60.0)
        together = await asyncio.gather(*(answers.ask(body, 1 << 20) for body in bodies), return_exceptions=True)
        await answers.close()
        alone = [body | {"rid": f"alone-{i}"} for i, body in enumerate(bodies) if i != 4]
        return together, [await http.call_once("/generate", body, 1 << 20) for body in alone]

    together, alone = sglang_live.over_http(server.endpoint, ask)
    # One that the server refuses is refused alone.
    refused = together.pop(4)
    assert type(refused) is EngineError
    assert "status 400" in str(refused)
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, bytes)
        fields = [
            decode_compact(msgspec.msgpack.decode(x)["meta_info"]["compact_answer"], 1 << 20) for x in (one, other)
        ]
        assert fields[0].output_ids == fields[1].output_ids
        assert fields[0].kept_ids == fields[1].kept_ids
        assert fields[0].expert_ids == fields[1].expert_ids


def test_requests_of_a_call_whose_client_has_left_are_aborted(server: SGLangServer):
    bodies = [
        request_body(replace(r, max_new_tokens=190, stop_ids=()), f"left-{i}", 0)
        for i, r in enumerate(make_requests(8))
    ]

    async def leave(http: SGLangHttp) -> None:
        answers = ManyAnswers(http, 60.0)
        asks = [asyncio.create_task(answers.ask(body, 1 << 20)) for body in bodies]
        while await running(http) < len(bodies):
            await asyncio.sleep(0.01)
        # One leaves, and its call goes on; then all have left.
        asks[0].cancel()
        while await running(http) == len(bodies):
            await asyncio.sleep(0.01)
        assert not any(ask.done() for ask in asks[1:])
        for ask in asks:
            ask.cancel()
        while await running(http):
            await asyncio.sleep(0.01)

    async def running(http: SGLangHttp) -> int:
        (load,) = (await http.get("/v1/loads"))["loads"]
        return load["num_running_reqs"]

    sglang_live.over_http(server.endpoint, leave, max_connections=4)


def test_a_prompt_that_came_several_times_at_once_is_computed_once(server: SGLangServer):
    prompt = [7, 3, 9, 11, 2, 30, 21, 5, 40, 17, 8, 33]
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 3}
    body = {"input_ids": [prompt] * 8, "sampling_params": [sampling] * 8, "return_logprob": True}
    answers = sglang_live.post(server.endpoint, "/generate", body).json()
    # The last token of a prompt, whose output is sampled from, is computed for each.
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert sorted(cached) == [0] + 7 * [len(prompt) - 1]
    # And they are sampled from the same distributions.
    logprobs = [[x[0] for x in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
    assert np.allclose(logprobs, logprobs[0], atol=1e-5)


def test_a_paused_server_leaves_its_core_to_others(server: SGLangServer):
    key = server.endpoint.admin_key
    assert sglang_live.post(server.endpoint, "/pause_generation", {"mode": "retract"}, key=key).status_code == 200
    try:
        before = _scheduler_seconds(server)
        time.sleep(2.0)
        used = _scheduler_seconds(server) - before
    finally:
        sglang_live.post(server.endpoint, "/continue_generation", {}, key=key)
    # One that looks for work all the time takes its part of these two seconds, however many others want one.
    assert used < 0.05


def _scheduler_seconds(server: SGLangServer) -> float:
    """CPU time that the server's scheduler has taken."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, state = (folder / "stat").read_text().rpartition(") ")
        except OSError:  # ended meanwhile
            continue
        fields = state.split()
        # The kernel keeps 15 characters of a name.
        if "(sglang::schedul" in name and int(fields[1]) == server.endpoint.pid:
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise AssertionError("the server has no scheduler")


def test_requests_without_a_seed_differ(server: SGLangServer):
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}}
    drawn = {tuple(sglang_live.post(server.endpoint, "/generate", body).json()["output_ids"]) for _ in range(4)}
    assert len(drawn) == 4


def test_moerl_sglang_check_proves_environment_and_server(server: SGLangServer, environment: Path, capsys):
    from moerl.cli import main

    patches = verify_installation(site_packages(environment))
    file = server.folder / "server.json"
    assert main(["sglang", "check", "--env", str(environment), "--server", str(file)]) == 0
    assert f"server: sglang {patches.version}, fingerprint {patches.fingerprint}" in capsys.readouterr().out
