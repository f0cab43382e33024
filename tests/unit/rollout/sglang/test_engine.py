"""The client against a server that answers as badly as a test asks; live servers are in `tests/sglang`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from sglang_fake import SPEC, Answer, FakeLauncher, FakeServer, contract_report, of_release, reply, server_info

from moerl.contract.ports import RolloutEngine, RolloutRequest
from moerl.contract.trajectory import MAX_KEPT_IDS, Lineage, SamplingParams, Trajectory
from moerl.errors import EngineError
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.request_loop import MAX_FAILURES
from moerl.rollout.sglang.patches import releases


@pytest.fixture
def connect(fake: FakeServer, engine_on: Callable[..., FleetEngine]) -> Callable[..., FleetEngine]:
    return partial(engine_on, fake)


def requests(count: int) -> list[RolloutRequest]:
    sampling = SamplingParams(top_p=0.9, seed=5)
    return [RolloutRequest(Lineage(f"r{i}", "p", "g"), (1, 2, 3), sampling, 4 + i % 3, (0,)) for i in range(count)]


def test_every_request_becomes_one_valid_trajectory(fake: FakeServer, connect):
    engine = connect()
    assert isinstance(connect(), RolloutEngine)
    assert (engine.handshake().spec, engine.handshake().policy_version) == (SPEC, 3)
    records = {record.rollout_id: Trajectory(**record.values) for record in engine.generate(requests(9))}
    assert sorted(records) == [f"r{i}" for i in range(9)]
    assert all(t.engine_id == "e-0" and t.attempt == 0 for t in records.values())
    assert engine.unfinished == []


def test_a_request_says_all_that_the_contract_needs(fake: FakeServer, connect):
    list(connect().generate(requests(1)))
    (body,) = fake.bodies
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "ignore_eos": True,
        "stop_token_ids": [0],
        "temperature": 1.0,
        "sampling_seed": 5,
        "top_p": 0.9,
        "min_p": 0.0,
        "top_k": MAX_KEPT_IDS,
    }
    assert body["extra_key"] == "weights-3"
    assert body["return_sampling_mask"]
    assert body["compact_answer"]
    assert body["rid"].endswith("-r0")


def spoiled(kind: str, body: dict[str, Any]) -> Answer:
    good = reply(body)
    whole = msgspec.msgpack.encode(good)
    field = good["meta_info"]["compact_answer"]
    answers: dict[str, Answer] = {
        "no answer": (0, b""),
        "overloaded": (503, b"busy"),
        "half an answer": (200, whole[: len(whole) // 2]),
        "a list": (200, msgspec.msgpack.encode([])),
        "no meta": (200, msgspec.msgpack.encode({})),
        "of another request": (200, msgspec.msgpack.encode(reply(body, id="other"))),
        "corrupt": (200, msgspec.msgpack.encode(reply(body, compact_answer=field[:-8] + bytes(8)))),
        "truncated": (200, msgspec.msgpack.encode(reply(body, compact_answer=field[:40]))),
        "without the field": (200, msgspec.msgpack.encode(reply(body, compact_answer=None))),
        "more from the cache than was sent": (200, msgspec.msgpack.encode(reply(body, cached_tokens=4))),
        "less than nothing from the cache": (200, msgspec.msgpack.encode(reply(body, cached_tokens=-1))),
        "nothing said of the cache": (200, msgspec.msgpack.encode(reply(body, cached_tokens=None))),
        "half a token from the cache": (200, msgspec.msgpack.encode(reply(body, cached_tokens=1.5))),
    }
    return answers[kind]


KINDS = ["no answer", "overloaded", "half an answer", "a list", "no meta", "of another request", "corrupt", "truncated"]


CACHED = [
    *("more from the cache than was sent", "less than nothing from the cache"),
    *("nothing said of the cache", "half a token from the cache"),
]


@pytest.mark.parametrize("kind", [*KINDS, "without the field", *CACHED])
def test_a_damaged_answer_is_asked_for_again_under_the_same_rollout_id(kind: str, fake: FakeServer, connect):
    good = fake.answer
    fake.answer = lambda body: spoiled(kind, body) if len(fake.bodies) <= 2 else good(body)
    (record,) = connect().generate(requests(1))
    assert (record.rollout_id, record.values["attempt"]) == ("r0", 2)
    rids = [body["rid"] for body in fake.bodies]
    assert len(set(rids)) == 3
    assert len({len(rid) for rid in rids}) == 1


def test_tokens_from_prefix_caches_are_counted_over_those_that_were_sent(fake: FakeServer, connect):
    fake.answer = lambda body: (200, msgspec.msgpack.encode(reply(body, cached_tokens=len(body["input_ids"]) - 1)))
    engine = connect()
    list(engine.generate(requests(5)))
    assert (engine.costs.asked_tokens, engine.costs.cached_tokens) == (5 * 3, 5 * 2)


def test_a_request_that_never_gets_a_whole_answer_is_named_unfinished(fake: FakeServer, connect):
    good = fake.answer
    fake.answer = lambda body: (503, b"busy") if body["rid"].endswith("-r1") else good(body)
    engine = connect()
    records: list[str] = []
    with pytest.raises(EngineError, match="busy"):
        records += [record.rollout_id for record in engine.generate(requests(3))]
    assert "r1" in engine.unfinished
    assert len([b for b in fake.bodies if b["rid"].endswith("-r1")]) == MAX_FAILURES


def test_a_refusal_is_not_asked_for_again(fake: FakeServer, connect):
    fake.answer = lambda body: (400, b"top_k is too large")
    with pytest.raises(EngineError, match="top_k is too large"):
        list(connect().generate(requests(1)))
    assert len(fake.bodies) == 1


def test_a_server_that_says_nothing_is_given_up_at_the_deadline(fake: FakeServer, connect):
    release = threading.Event()
    fake.answer = lambda body: (503 if release.wait(20) else 504, b"")
    with pytest.raises(EngineError, match="no answer in time"):
        list(connect(response_seconds=0.3).generate(requests(1)))
    release.set()


def test_an_answer_longer_than_what_was_asked_for_takes_is_given_up(fake: FakeServer, connect):
    fake.answer = lambda body: (200, msgspec.msgpack.encode(reply(body, more=bytes(100_000))))
    with pytest.raises(EngineError, match="too long"):
        list(connect().generate(requests(1)))


def test_an_answer_shorter_than_asked_for_is_refused(fake: FakeServer, connect):
    def short(body: dict[str, Any]) -> Answer:
        body["sampling_params"]["max_new_tokens"] -= 1
        return 200, msgspec.msgpack.encode(reply(body))

    fake.answer = short
    with pytest.raises(EngineError, match="length of the response"):
        list(connect().generate(requests(1)))


def test_an_answer_that_stays_broken_is_delivered_with_what_the_contract_says(fake: FakeServer, connect):
    fake.answer = lambda body: (200, msgspec.msgpack.encode(reply(body, weight_versions=None)))
    (record,) = connect().generate(requests(1))
    assert len(fake.bodies) == 4
    assert (record.refusal.reason, record.refusal.field) == ("message_malformed", "weight_versions")
    assert record.values["meta_info"]["compact_answer"]


def cut_short(body: dict[str, Any], count: int = 0) -> Answer:
    """An answer that was aborted after `count` tokens."""
    answer = reply(body | {"sampling_params": {"max_new_tokens": count}}, finish_reason={"type": "abort"})
    if count == 0:
        del answer["meta_info"]["compact_answer"]
    return 200, msgspec.msgpack.encode(answer)


def test_a_request_aborted_before_its_first_token_yields_nothing(fake: FakeServer, connect):
    engine = connect()

    def abort(body: dict[str, Any]) -> Answer:
        (call,) = engine._calls.values()
        call.rollouts[body["rid"].partition("-")[2]].is_aborted = True
        return cut_short(body)

    fake.answer = abort
    assert list(engine.generate(requests(2))) == []
    assert engine.unfinished == ["r0", "r1"]


def test_an_answer_that_nobody_cut_short_may_not_be_short(fake: FakeServer, connect):
    good = fake.answer
    fake.answer = lambda body: cut_short(body, 2) if len(fake.bodies) == 1 else good(body)
    (record,) = connect().generate(requests(1))
    assert record.values["attempt"] == 1
    assert [len(body["input_ids"]) for body in fake.bodies] == [3, 3]


def test_an_abort_names_the_running_request_and_skips_the_waiting_ones(fake: FakeServer, connect):
    arrived, release = threading.Event(), threading.Event()
    good = fake.answer

    def hold(body: dict[str, Any]) -> Answer:
        if len(fake.bodies) == 4:
            arrived.set()
        release.wait(20)
        return good(body)

    fake.answer = hold
    engine = connect()
    iterator = engine.generate(requests(6))
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.extend(iterator))
    thread.start()
    assert arrived.wait(20)
    engine.abort()
    release.set()
    thread.join()
    assert len(fake.admin_calls) == 4
    assert {body["rid"] for body in fake.bodies} == {call["rid"] for _, call in fake.admin_calls}
    assert sorted(engine.unfinished) == ["r4", "r5"]


def test_calls_overlap_and_each_has_its_own_records(fake: FakeServer, connect):
    engine = connect()
    first, second = (
        requests(3),
        [replace(r, lineage=replace(r.lineage, rollout_id=f"s{i}")) for i, r in enumerate(requests(2))],
    )
    iterator = engine.generate(first)
    found = {next(iterator).rollout_id}
    assert {record.rollout_id for record in engine.generate(second)} == {"s0", "s1"}
    assert found | {record.rollout_id for record in iterator} == {"r0", "r1", "r2"}


def test_requests_beyond_the_server_are_refused_at_once(fake: FakeServer, connect):
    long = RolloutRequest(Lineage("r0", "p", "g"), (1,) * 60, SamplingParams(), 41)
    with pytest.raises(EngineError, match="max_new_tokens"):
        connect().generate([long])
    assert fake.bodies == []


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"fingerprint": ""}, "patches; seen: unstamped"),
        ({"fingerprint": "0" * 16}, "patches"),
        ({"compact_schema": 2}, "compact answers"),
        ({"moe_layers": [0, 1, 2, 3]}, "MoE layers"),
        ({"moe_layers": [0, 1]}, "MoE layers"),
        ({"num_experts": 16}, "number of experts"),
        ({"experts_per_token": 4}, "experts per token"),
        ({"expert_ids": "physical"}, "expert ids"),
        ({"expert_bytes": 2}, "expert ids"),
        ({"vocab_size": 49}, "ids that can be sampled"),
        ({"vocab_size": 51}, "ids that can be sampled"),
        ({"moe_layers": "all"}, "handshake"),
    ],
)
def test_a_server_that_lacks_something_is_refused_by_name(report, message: str, fake: FakeServer, connect):
    fake.info = server_info(internal_states=[{"contract": contract_report(**report)}])
    with pytest.raises(EngineError, match=message):
        connect()


@pytest.mark.parametrize("release", releases())
def test_a_server_of_every_release_with_its_own_patches_is_taken(release: str, fake: FakeServer, connect):
    fake.info = of_release(release)
    assert len(list(connect().generate(requests(2)))) == 2


def test_servers_of_two_releases_in_one_run_are_refused(fake: FakeServer, engine_on):
    other = FakeServer()
    other.info = of_release("0.5.23")
    try:
        with pytest.raises(EngineError, match="SGLang servers of different releases"):
            engine_on(fake, other)
    finally:
        other.close()


def test_a_server_of_another_precision_is_refused_and_left(fake: FakeServer, engine_on):
    launcher = FakeLauncher(fake)
    with pytest.raises(EngineError, match="precision"):
        engine_on(launcher, dtype="bfloat16")
    assert launcher.is_closed


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"version": "0.5.22"}, r"release; seen: 0\.5\.22; expected: 0\.5\.21 or 0\.5\.23"),
        ({"version": "0.5.23"}, "patches"),
        ({"internal_states": [{}]}, "no contract"),
        ({"internal_states": []}, "no contract"),
        ({"sampling_backend": "flashinfer"}, "--sampling-backend"),
        ({"sampling_mask_max_tokens": 512}, "--sampling-mask-max-tokens"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_eplb": True}, "places of experts; seen: .*enable_eplb"),
        ({"ep_dispatch_algorithm": "fake"}, "places of experts; seen: .*ep_dispatch_algorithm"),
    ],
)
def test_a_server_with_unfit_options_is_refused_by_name(info, message: str, fake: FakeServer, connect):
    fake.info = server_info(**info)
    with pytest.raises(EngineError, match=message):
        connect()


def test_weights_without_a_number_are_refused(fake: FakeServer, connect):
    fake.weight_version = "default"
    with pytest.raises(EngineError, match="weight version"):
        connect()
