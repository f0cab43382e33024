"""The reader of answers: what it takes, what it costs, and when it ends. Attacks: tests/unit/tasks/rewards."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

import aiohttp
import msgspec
import pytest
from memory import traced
from multidict import CIMultiDict
from raw_http import RawServer, whole

from moerl.http.client import MAX_SAID_BYTES, BlockingClient, HttpAnswer, HttpClient, NoAnswerError, Request, decoded
from moerl.http.keys import Key

SECONDS = 60.0


class FakeResponse:
    """Its body has so many pieces, of one byte each."""

    def __init__(self, status: int, pieces: int) -> None:
        self.status, self.headers, self.content = status, CIMultiDict[str](), self
        self._pieces = pieces

    async def iter_any(self) -> AsyncIterator[bytes]:
        for _ in range(self._pieces):
            yield b"x"


def read(status: int, pieces: int, max_bytes: int) -> bytes:
    response = cast(aiohttp.ClientResponse, FakeResponse(status, pieces))
    return asyncio.run(HttpAnswer(Request("GET", "http://a"), response).read(max_bytes))


def test_an_answer_of_many_small_pieces_takes_no_more_than_its_bytes():
    with traced() as peak:
        assert len(read(200, 1 << 16, 1 << 16)) == 1 << 16
    assert peak() < 4 << 16


def test_reading_ends_where_the_limit_is_passed():
    with pytest.raises(NoAnswerError, match="too long"):
        read(200, 1 << 40, 1000)


def test_of_a_refusal_the_beginning_is_read_however_long_it_is():
    assert len(read(500, 1 << 40, 10)) == MAX_SAID_BYTES
    assert len(read(400, 100, 10)) == 100


@pytest.mark.parametrize("content", [b"", b"[", b"9" * 100_000, b"[" * 200_000, b'{"a":' * 100_000, b"NaN", b'"\xff"'])
def test_what_is_no_json_is_no_answer(content: bytes):
    with pytest.raises(NoAnswerError, match="unreadable"):
        decoded(content, msgspec.json.Decoder(dict[str, object]).decode)


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    made: list[RawServer] = []

    def begin(answer: Callable[[], list[bytes]]) -> RawServer:
        made.append(RawServer(answer))
        return made[-1]

    yield begin
    for server in made:
        server.close()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/", "http://a..b/", "http://[::1/", "http:///", "http://\u00e9\u2024:1/", "ftp://a/"]
)
def test_an_address_that_is_none_is_no_answer(url: str):
    async def ask() -> None:
        async with HttpClient(max_connections=1) as client, client.ask(Request("GET", url), SECONDS):
            pass

    with pytest.raises(NoAnswerError, match=r"the connection failed|no such address"):
        asyncio.run(ask())


def test_threads_that_wait_share_connections(serve: Callable[..., RawServer]):
    server = serve(lambda: whole(b"5", "X-A: b"))
    client = BlockingClient(max_connections=2)
    answer = client.ask(Request("GET", server.url), 10, SECONDS)
    assert (answer.status, answer.content, answer.headers["x-a"]) == (200, b"5", "b")
    client.close()


def test_who_waits_when_the_client_is_closed_is_told_and_so_is_who_asks_later(serve: Callable[..., RawServer]):
    is_asked, is_over = threading.Event(), threading.Event()

    def answer() -> list[bytes]:
        is_asked.set()
        is_over.wait(SECONDS)
        return []

    server, client, errors = serve(answer), BlockingClient(max_connections=1), list[str]()

    def ask() -> None:
        try:
            client.ask(Request("GET", server.url), 10, SECONDS)
        except NoAnswerError as error:
            errors.append(error.what)

    waiting = [threading.Thread(target=ask) for _ in range(3)]  # two of them for a connection
    for each in waiting:
        each.start()
    is_asked.wait(SECONDS)
    client.close()
    for each in waiting:
        each.join()
    ask()
    client.close()
    is_over.set()
    assert errors == ["given up, as the client was closed"] * 4


def test_a_proxy_of_the_environment_is_used_where_it_is_asked_for_alone(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
):
    proxy, server = serve(lambda: whole(b"proxy")), serve(lambda: whole(b"server"))
    monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
    monkeypatch.setenv("no_proxy", "")
    for uses_proxies, content in ((True, b"proxy"), (False, b"server")):
        client = BlockingClient(max_connections=1, uses_proxies=uses_proxies)
        assert client.ask(Request("GET", server.url, key=Key("a-key")), 10, SECONDS).content == content
        client.close()
    assert proxy.asked[0].startswith(f"GET {server.url} HTTP/1.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    client = BlockingClient(max_connections=1, uses_proxies=True)
    assert client.ask(Request("GET", server.url), 10, SECONDS).content == b"server"
    client.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("kind", ["refuses", "is not there", "is of another protocol", "is no address"])
def test_the_password_of_a_proxy_goes_to_the_proxy_and_into_no_error(
    kind: str, scheme: str, serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
):
    proxy = serve(lambda: whole(b"", status="407 Who"))
    address = {
        "refuses": proxy.url.removesuffix("/v1"),
        "is not there": "http://127.0.0.1:9",
        "is of another protocol": "socks5://127.0.0.1:9",
        "is no address": "http://127.0.0.1:port",
    }
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv(f"{scheme}_proxy", address[kind].replace("://", "://user:very-secret@"))
    client = BlockingClient(max_connections=1, uses_proxies=True)
    try:
        if (kind, scheme) == ("refuses", "http"):
            assert client.ask(Request("GET", "http://127.0.0.1:1"), 10, SECONDS).status == 407
        else:
            with pytest.raises(NoAnswerError) as caught:
                client.ask(Request("GET", f"{scheme}://127.0.0.1:1"), 10, SECONDS)
            assert "very-secret" not in "".join(traceback.format_exception(caught.value))
    finally:
        client.close()
    assert all("Proxy-Authorization: Basic " in each for each in proxy.asked)
