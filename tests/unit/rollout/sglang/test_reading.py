"""Answers that are encoded are refused before they are expanded, whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest
import torch
import zstandard
from memory import traced
from sglang_fake import FakeServer

from moerl.errors import MoerlError
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.held import ServedModel, held_checksums
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.reading import MAX_SAID_BYTES, TransportError, read
from moerl.rollout.sglang.weights import LinkOptions, WeightLink

BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer()
    monkeypatch.setattr("moerl.rollout.sglang.http._BACKOFF_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(server, "respond", lambda path, key, body: (200, BOMB))
    yield server
    server.close()


def over_http(call: Callable[[SGLangHttp], object]) -> Callable[[Endpoint], object]:
    async def ask(endpoint: Endpoint) -> object:
        http = SGLangHttp(endpoint, max_connections=1, timeout_seconds=60.0)
        try:
            return await call(http)  # pyright: ignore[reportGeneralTypeIssues]
        finally:
            await http.close()

    return lambda endpoint: asyncio.run(ask(endpoint))


def over_a_link(endpoint: Endpoint) -> None:
    WeightLink("s", endpoint, LinkOptions(1, "gloo", 60.0), torch.device("cpu")).begin()


CALLS: dict[str, Callable[[Endpoint], object]] = {
    "facts": over_http(lambda http: http.get("/server_info")),
    "a version": over_http(lambda http: http.get_once("/model_info")),
    "a response": over_http(lambda http: http.post_once("/generate", {"rid": "r"}, 1 << 30)),
    "an abort": over_http(lambda http: http.admin("/abort_request", {})),
    "weights": over_a_link,
    "checksums": lambda endpoint: held_checksums(endpoint, ServedModel({}, 1, {}), timeout_seconds=60.0),
}


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "identity, zstd", "ZSTD"])
@pytest.mark.parametrize("kind", CALLS)
def test_an_encoded_answer_is_refused_before_it_is_expanded(kind: str, encoding: str, fake: FakeServer):
    fake.encoding = encoding
    with traced() as peak, pytest.raises(MoerlError, match="encoded"):
        CALLS[kind](fake.endpoint)
    assert peak() < 8 << 20
    assert fake.accepted == {"identity"}


def test_a_health_probe_reads_no_answer(fake: FakeServer):
    from moerl.rollout.sglang.server import answers_health

    fake.encoding = "zstd"
    with traced() as peak:
        assert answers_health(fake.endpoint)
    assert peak() < 8 << 20


def response(status: int, pieces: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers, stream=Pieces(pieces))


class Pieces(httpx.SyncByteStream):
    """Endless but for a count; of one byte each."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __iter__(self) -> Iterator[bytes]:
        while self.left:
            self.left -= 1
            yield b"x"


def test_an_answer_of_many_small_pieces_takes_no_more_than_its_bytes():
    with traced() as peak:
        assert len(read("/p", response(200, 1 << 16), 1 << 16)) == 1 << 16
    assert peak() < 4 << 16


def test_reading_ends_where_the_limit_is_passed():
    endless = response(200, 1 << 40)
    with pytest.raises(TransportError, match="too long"):
        read("/p", endless, 1000)


def test_of_a_refusal_the_beginning_is_read_however_long_it_is():
    assert len(read("/p", response(500, 1 << 40), 10)) == MAX_SAID_BYTES
    assert len(read("/p", response(400, 100), 10)) == 100
