"""Connections to one server: many requests at a time, what they cost, and answers that are not what was asked for."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zstandard
from memory import traced
from sglang_fake import FakeServer, reply
from sglang_live import over_http

from moerl.errors import MoerlError
from moerl.http import client
from moerl.rollout.fleet import backoff
from moerl.rollout.fleet.backend import TransportError
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.sglang.digests import ServedModel, weight_digests
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.many_answers import ManyAnswers
from moerl.rollout.sglang.server import answers_health
from moerl.rollout.sglang.update_calls import UpdateCalls

NUM = 96
BODY = {"rid": "r", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}, "return_sampling_mask": False}


async def ask_all(client: SGLangHttp) -> int:
    """Answered requests of NUM that are under way together."""
    answers = await asyncio.gather(*(client.call_once("/generate", BODY, 1 << 20) for _ in range(NUM)))
    return len(answers)


def test_as_many_requests_are_under_way_as_there_are_connections(fake: FakeServer):
    together = threading.Barrier(NUM)

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        together.wait(60.0)  # breaks, and the test with it, unless all of them come
        return 200, msgspec.msgpack.encode(reply(body))

    fake.answer = answer
    assert over_http(fake.endpoint, ask_all, max_connections=NUM) == NUM


def test_more_requests_than_connections_wait_for_one(fake: FakeServer):
    assert over_http(fake.endpoint, ask_all, max_connections=4) == NUM
    assert fake.num_connections == 8  # four are for calls beside requests


def test_connections_that_are_there_are_taken_before_others_are_opened(fake: FakeServer):
    """Else a later request, which has one, overtakes those that open theirs."""

    async def ask_again(http: SGLangHttp) -> list[int]:
        opened: list[int] = []
        for _ in range(8):
            await asyncio.gather(*(http.call_once("/generate", BODY, 1 << 20) for _ in range(3)))
            opened.append(fake.num_connections)
        return opened

    opened = over_http(fake.endpoint, ask_again, max_connections=NUM)
    assert opened == [3] * 8


@pytest.mark.parametrize("max_connections", [4, NUM], ids=["some wait for a connection", "all have one"])
def test_calls_under_way_when_their_server_is_given_up_fail_and_are_not_cancelled(
    fake: FakeServer, max_connections: int
):
    is_over = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        is_over.wait(60.0)
        return 200, msgspec.msgpack.encode(reply(body))

    fake.answer = answer

    async def give_up(client: SGLangHttp) -> list[object]:
        calls = [asyncio.create_task(client.call_once("/generate", BODY, 1 << 20)) for _ in range(NUM)]
        while fake.num_connections < min(NUM, max_connections + 4):
            await asyncio.sleep(0.01)
        await client.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    found = over_http(fake.endpoint, give_up, max_connections=max_connections)
    is_over.set()
    assert {type(each) for each in found} == {TransportError}


def test_a_connection_that_its_server_may_be_about_to_close_is_not_used(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "_IDLE_SECONDS", 0.05)

    async def ask_twice(http: SGLangHttp) -> int:
        for pause in (0.0, 0.2):
            await asyncio.sleep(pause)
            await http.call_once("/generate", BODY, 1 << 20)
        return fake.num_connections

    assert over_http(fake.endpoint, ask_twice) == 2


def test_a_server_is_told_once_that_what_it_consists_of_is_no_garbage(
    fake: FakeServer, engine_on: Callable[..., FleetEngine]
):
    engine_on(fake)
    assert fake.frozen == 1


# --- answers of an enemy ----------------------------------------------------------------------------------------------

BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))

CALLS: dict[str, Callable[[SGLangHttp], Any]] = {
    "facts": lambda http: http.get("/server_info"),
    "a version": lambda http: http.get_once("/model_info"),
    "a response": lambda http: http.call_once("/generate", {"rid": "r"}, 1 << 30),
    "responses": lambda http: ManyAnswers(http, 60.0).ask({"rid": "r"}, 1 << 30),
    "an abort": lambda http: http.admin("/abort_request", {}),
    "weights": lambda http: UpdateCalls("s", http, 60.0).begin_update(),
    "checksums": lambda http: weight_digests(http, ServedModel({}, 1, {}), 60.0),
}


@pytest.fixture
def bombs(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """Returns a server whose answers all unpack to 256 MiB."""
    monkeypatch.setattr(backoff, "PAUSE_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(fake, "respond", lambda path, key, body: (200, BOMB))
    return fake


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "identity, zstd", "ZSTD"])
@pytest.mark.parametrize("kind", CALLS)
def test_an_encoded_answer_is_refused_before_it_is_expanded(kind: str, encoding: str, bombs: FakeServer):
    bombs.encoding = encoding
    with traced() as peak, pytest.raises(MoerlError, match="encoded"):
        over_http(bombs.endpoint, CALLS[kind])
    assert peak() < 8 << 20
    assert bombs.accepted == {"identity"}


def test_a_health_probe_reads_no_answer(bombs: FakeServer):
    bombs.encoding = "zstd"
    with traced() as peak:
        assert answers_health(bombs.endpoint)
    assert peak() < 8 << 20


@pytest.mark.parametrize("kind", CALLS)
def test_a_server_that_sends_its_keys_back_does_not_have_them_shown(
    kind: str, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    keys = ("sampling-5f3a9c7e1b2d", "admin-8c6e4a2b0d9f")
    endpoint = Endpoint(fake.endpoint.url, *keys)
    monkeypatch.setattr(backoff, "PAUSE_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(fake, "respond", lambda path, key, body: (400, f'{{"keys": "{keys}"}}'.encode()))
    with pytest.raises(MoerlError) as caught:
        over_http(endpoint, CALLS[kind])
    assert "[key]" in str(caught.value)
    assert not any(key in "".join(traceback.format_exception(caught.value)) for key in keys)
