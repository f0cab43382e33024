"""Answers that are encoded are refused before they are expanded, whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import aiohttp
import pytest
import zstandard
from memory import traced
from sglang_fake import FakeServer
from sglang_live import over_http

from moerl.errors import MoerlError
from moerl.rollout.fleet import backoff
from moerl.rollout.fleet.backend import TransportError
from moerl.rollout.sglang.digests import ServedModel, weight_digests
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.many_answers import ManyAnswers
from moerl.rollout.sglang.reading import MAX_SAID_BYTES, read
from moerl.rollout.sglang.update_calls import UpdateCalls

BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer()
    monkeypatch.setattr(backoff, "PAUSE_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(server, "respond", lambda path, key, body: (200, BOMB))
    yield server
    server.close()


CALLS: dict[str, Callable[[SGLangHttp], Any]] = {
    "facts": lambda http: http.get("/server_info"),
    "a version": lambda http: http.get_once("/model_info"),
    "a response": lambda http: http.post_once("/generate", {"rid": "r"}, 1 << 30),
    "responses": lambda http: ManyAnswers(http, 60.0).ask({"rid": "r"}, 1 << 30),
    "an abort": lambda http: http.admin("/abort_request", {}),
    "weights": lambda http: UpdateCalls("s", http, 60.0).begin(),
    "checksums": lambda http: weight_digests(http, ServedModel({}, 1, {}), 60.0),
}


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "identity, zstd", "ZSTD"])
@pytest.mark.parametrize("kind", CALLS)
def test_an_encoded_answer_is_refused_before_it_is_expanded(kind: str, encoding: str, fake: FakeServer):
    fake.encoding = encoding
    with traced() as peak, pytest.raises(MoerlError, match="encoded"):
        over_http(fake.endpoint, CALLS[kind])
    assert peak() < 8 << 20
    assert fake.accepted == {"identity"}


def test_a_health_probe_reads_no_answer(fake: FakeServer):
    from moerl.rollout.sglang.server import answers_health

    fake.encoding = "zstd"
    with traced() as peak:
        assert answers_health(fake.endpoint)
    assert peak() < 8 << 20


class FakeResponse:
    """Its body has so many pieces, of one byte each."""

    def __init__(self, status: int, pieces: int) -> None:
        self.status, self.headers, self.content = status, dict[str, str](), self
        self._pieces = pieces

    async def iter_any(self) -> AsyncIterator[bytes]:
        for _ in range(self._pieces):
            yield b"x"


def response(status: int, pieces: int) -> aiohttp.ClientResponse:
    return cast(aiohttp.ClientResponse, FakeResponse(status, pieces))


def test_an_answer_of_many_small_pieces_takes_no_more_than_its_bytes():
    with traced() as peak:
        assert len(asyncio.run(read("/p", response(200, 1 << 16), 1 << 16))) == 1 << 16
    assert peak() < 4 << 16


def test_reading_ends_where_the_limit_is_passed():
    endless = response(200, 1 << 40)
    with pytest.raises(TransportError, match="too long"):
        asyncio.run(read("/p", endless, 1000))


def test_of_a_refusal_the_beginning_is_read_however_long_it_is():
    assert len(asyncio.run(read("/p", response(500, 1 << 40), 10))) == MAX_SAID_BYTES
    assert len(asyncio.run(read("/p", response(400, 100), 10))) == 100
