"""Connections to one server: many requests at a time, and what they cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sglang_fake import FakeServer, reply
from sglang_live import over_http

from moerl.rollout.fleet.backend import TransportError
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.sglang import http
from moerl.rollout.sglang.http import SGLangHttp

NUM = 96
BODY = {
    "rid": "r",
    "input_ids": [1, 2],
    "sampling_params": {"max_new_tokens": 1},
    "return_sampling_mask": False,
}


async def ask_all(client: SGLangHttp) -> int:
    """Answered requests of NUM that are under way together."""
    answers = await asyncio.gather(*(client.post_once("/generate", BODY, 1 << 20) for _ in range(NUM)))
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

    async def ask_again(client: SGLangHttp) -> list[int]:
        opened: list[int] = []
        for _ in range(8):
            await asyncio.gather(*(client.post_once("/generate", BODY, 1 << 20) for _ in range(3)))
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
        calls = [asyncio.create_task(client.post_once("/generate", BODY, 1 << 20)) for _ in range(NUM)]
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
    monkeypatch.setattr(http, "_IDLE_SECONDS", 0.05)

    async def ask_twice(client: SGLangHttp) -> int:
        for pause in (0.0, 0.2):
            await asyncio.sleep(pause)
            await client.post_once("/generate", BODY, 1 << 20)
        return fake.num_connections

    assert over_http(fake.endpoint, ask_twice) == 2


def test_a_server_is_told_once_that_what_it_consists_of_is_no_garbage(
    fake: FakeServer, engine_on: Callable[..., FleetEngine]
):
    engine_on(fake)
    assert fake.frozen == 1
