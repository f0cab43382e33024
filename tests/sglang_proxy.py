"""A proxy in front of a live server that spoils answers on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.sglang.many_answers import HEAD, PATH

Spoil = Callable[[bytes, bytes], bytes]
"""From an answer and the one before it to what the client gets; shorter than announced where bytes are missing."""


class Proxy:
    """Passes everything on; of the answers to rollouts every second is spoilt.

    Attributes:
        endpoint: for clients.
    """

    def __init__(self, behind: Endpoint, spoil: Spoil) -> None:
        self._behind, self._spoil, self._lock = behind, spoil, threading.Lock()
        self._num_answers, self._before = 0, b""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        # A client that gives up closes its connection.
        self._http.handle_error = lambda request, client_address: None  # pyright: ignore[reportAttributeAccessIssue]
        self.endpoint = replace(behind, url=f"http://127.0.0.1:{self._http.server_address[1]}")
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def pass_on(self, method: str, path: str, body: bytes, key: str) -> tuple[int, str, int, bytes]:
        """Status, content type, announced length and content."""
        headers = {"Authorization": key, "Content-Type": "application/json"}
        answer = httpx.request(
            method, self._behind.url + path, content=body, headers=headers, timeout=120.0, trust_env=False
        )
        content = answer.content
        length, sent = self._spoilt(content) if path == PATH else (len(content), content)
        return answer.status_code, answer.headers.get("content-type", ""), length, sent

    def _spoilt(self, content: bytes) -> tuple[int, bytes]:
        """Length that is announced and what is sent of the answers to a call: nothing behind one that is cut off."""
        sent = b""
        while content:
            place, status, length = HEAD.unpack_from(content)
            whole, content = content[HEAD.size : HEAD.size + length], content[HEAD.size + length :]
            with self._lock:
                self._num_answers += 1
                spoilt = self._spoil(whole, self._before) if self._num_answers % 2 == 0 else whole
                self._before = whole
            is_cut = len(spoilt) < len(whole) and spoilt == whole[: len(spoilt)]
            sent += HEAD.pack(place, status, len(whole) if is_cut else len(spoilt)) + spoilt
            if is_cut:
                return len(sent) + 1, sent
        return len(sent), sent

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass_on(b"")

            def do_POST(self) -> None:
                self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

            def _pass_on(self, body: bytes) -> None:
                key = self.headers.get("Authorization", "")
                status, kind, length, content = proxy.pass_on(self.command, self.path, body, key)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(content)
                self.close_connection = len(content) < length

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        return Handler


@contextmanager
def spoiling(behind: Endpoint, spoil: Spoil) -> Iterator[Proxy]:
    proxy = Proxy(behind, spoil)
    try:
        yield proxy
    finally:
        proxy.close()


def corrupt(answer: bytes, before: bytes) -> bytes:
    """One bit of the binary field is another."""
    middle = answer.index(b"compact_answer") + len(b"compact_answer") + 40
    return answer[:middle] + bytes([answer[middle] ^ 4]) + answer[middle + 1 :]


def truncated(answer: bytes, before: bytes) -> bytes:
    return answer[: len(answer) // 2]


def oversized(answer: bytes, before: bytes) -> bytes:
    return answer + b"\0" * 1_000_000


def duplicated(answer: bytes, before: bytes) -> bytes:
    """Another request's answer, a second time."""
    return before


SPOILERS: dict[str, Spoil] = {
    "corrupt": corrupt,
    "truncated": truncated,
    "oversized": oversized,
    "duplicated": duplicated,
}
