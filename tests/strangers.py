"""Callers who do not know the key, and what they say."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

SAYINGS = {
    "nothing": b"",
    "half_of_a_length": b"\x00\x00",
    "half_of_an_answer": (100).to_bytes(4) + b"{sha256}",
    "an_answer_that_is_wrong": (40).to_bytes(4) + b"{sha256}" + bytes(32),
    "a_digest_that_is_no_text": (40).to_bytes(4) + b"{\xff\xfe}" + bytes(36),
    "an_endless_answer": (-1).to_bytes(4, signed=True) + (1 << 40).to_bytes(8) + bytes(1 << 16),
    "a_negative_length": (-5).to_bytes(4, signed=True) * 10,
    "another_protocol": b"GET / HTTP/1.1\r\n\r\n",
}


@contextmanager
def calling(host: str, port: int, said: bytes, count: int = 1) -> Iterator[list[socket.socket]]:
    """So many strangers, each of whom has said this, and holds the connection."""
    with ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection((host, port))) for _ in range(count)]
        for caller in callers:
            caller.sendall(said)
        yield callers


def is_hung_up_on(caller: socket.socket) -> bool:
    """Waits for it; what was said until then is left out."""
    caller.settimeout(30.0)
    try:
        while caller.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True
