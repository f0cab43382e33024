"""A server that sends any bytes as its answer: what is wrong on purpose, or never ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator

Bytes = Iterable[bytes]


class RawServer:
    """Listens on loopback until `close`. answer: what is sent to each request, until the client leaves.

    asked: heads and bodies of requests, in order.
    """

    def __init__(self, answer: Callable[[], Bytes]) -> None:
        self.answer, self.asked = answer, list[str]()
        self._is_closed = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def pause(self, seconds: float) -> None:
        """Waits; not after the end."""
        self._is_closed.wait(seconds)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # The client may leave at any time: that is what tests ask for.
        with connection, contextlib.suppress(OSError):
            self.asked.append(_request(connection))
            for piece in self.answer():
                if self._is_closed.is_set():
                    return
                connection.sendall(piece)


def _request(connection: socket.socket) -> str:
    """Reads a request; a body only where its length stands in the head."""
    content = b""
    while b"\r\n\r\n" not in content:
        content += connection.recv(1 << 16)
    head, _, body = content.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0].split(b":")[1]) if lengths else 0
    while len(body) < length:
        body += connection.recv(1 << 16)
    return (head + b"\n\n" + body).decode()


def whole(body: bytes, *headers: str, status: str = "200 OK") -> list[bytes]:
    """Returns an answer with its length."""
    # Said, as `RawServer` closes each connection: a client that asks again must not take this one.
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return ["\r\n".join(lines).encode(), body]


def for_ever(piece: bytes, first: bytes = b"") -> Iterator[bytes]:
    """Yields an answer that never ends."""
    yield first
    while True:
        yield piece
