"""The one place where callers are let in over TCP: only those who prove that they know a key. Standard library alone.

    whoever listens    `Admission`: hears each caller by itself, and hands on the connections of those who know the key
    a caller           `connect`

Strangers can call, too. One who says nothing, half of a handshake or something else costs a thread for a few seconds,
and keeps nobody else out.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

HANDSHAKE_SECONDS = 10.0
"""For all of a handshake; between processes of a run it takes milliseconds."""
CONNECT_SECONDS = 60.0
"""For a caller, who tries again where it was turned away."""
MAX_HANDSHAKES = 64
"""At the same time. The one that has taken longest makes room for one more caller."""
_LET_IN = b"#IN"
_PAUSE_SECONDS = 0.1
"""Before listening goes on where the system could not accept a caller: for want of descriptors, for example."""


class Admission:
    """A listening socket. Callers are heard side by side, each in a thread of its own.

    Args:
        host: where it listens, at a free port.
        admit: takes a connection and the caller's first words, in a thread; OSError refuses it.
        num_bytes: most that the first words may have; 0: there are none.

    Attributes:
        key: what callers have to know; made here.
    """

    def __init__(self, host: str, admit: Callable[[Connection, bytes], None], num_bytes: int = 0) -> None:
        self._admit, self._num_bytes = admit, num_bytes
        self.key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_HANDSHAKES)
        self.port = int(self._listener.getsockname()[1])
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._heard: dict[int, tuple[socket.socket, float]] = {}
        """Callers whose handshake is under way, in the order in which they came, and when their time is over."""
        self._is_closed = False
        threading.Thread(target=self._listen, name="admission", daemon=True).start()

    def close(self) -> None:
        """Listens no more, and turns away whoever has not been let in. Once more is harmless."""
        with self._lock:
            self._is_closed = True
            for caller, _ in self._heard.values():
                _hang_up(caller)
            # Not closed: the thread that listens might then accept at the next socket with this number.
            _hang_up(self._listener)

    def _listen(self) -> None:
        with self._listener:
            while not self._is_closed:
                with self._lock:
                    self._listener.settimeout(self._turn_late_ones_away())
                try:
                    caller, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    if not self._is_closed:
                        time.sleep(_PAUSE_SECONDS)
                    continue
                self._begin(caller)

    def _turn_late_ones_away(self) -> float | None:
        """Returns the seconds until the next one is late."""
        now = time.monotonic()
        for caller, until in self._heard.values():
            if until <= now:
                _hang_up(caller)
        return min((until - now for _, until in self._heard.values() if until > now), default=None)

    def _begin(self, caller: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                caller.close()
                return
            if len(self._heard) >= MAX_HANDSHAKES:
                first = next(iter(self._heard))
                _hang_up(self._heard.pop(first)[0])
            number = next(self._numbers)
            self._heard[number] = caller, time.monotonic() + HANDSHAKE_SECONDS
        try:
            # What the thread reads from is its own; the other one can be hung up by others.
            connection = Connection(caller.dup().detach())
            args = (number, caller, connection)
            threading.Thread(target=self._hear, args=args, name="handshake", daemon=True).start()
        except (OSError, RuntimeError):  # no descriptor, or no thread
            self._forget(number, caller)

    def _forget(self, number: int, caller: socket.socket) -> None:
        with self._lock:
            self._heard.pop(number, None)
        caller.close()

    def _hear(self, number: int, caller: socket.socket, connection: Connection) -> None:
        """Hands the connection on where the caller knows the key and was in time; closes it otherwise."""
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            words = connection.recv_bytes(self._num_bytes) if self._num_bytes else b""
            with self._lock:
                was_heard = self._heard.pop(number, None) is not None and not self._is_closed
            if not was_heard:
                raise ConnectionAbortedError("it took too long")
            connection.send_bytes(_LET_IN)
            self._admit(connection, words)
        except (AuthenticationError, OSError, EOFError, ValueError):
            # A stranger, or gone meanwhile.
            connection.close()
        finally:
            self._forget(number, caller)


def connect(host: str, port: int, key: bytes, *, seconds: float = CONNECT_SECONDS, words: bytes = b"") -> Connection:
    """Returns a connection to an `Admission`.

    Args:
        seconds: that it may take until one is accepted, and for each message of the handshake.
        words: the first ones.

    Raises:
        OSError: nobody listens there, or it takes too long. EOFError: it does not let this caller in.
        AuthenticationError: one side does not know the key.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return _connect(host, port, key, seconds, words)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            # It had to make room for others.
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_SECONDS)


def _connect(host: str, port: int, key: bytes, seconds: float, words: bytes) -> Connection:
    with socket.create_connection((host, port), timeout=seconds) as connected:
        connected.settimeout(None)
        _limit_receiving(connected, seconds)
        connection = Connection(connected.dup().detach())
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            if words:
                connection.send_bytes(words)
            # Until now it may have had to make room.
            connection.recv_bytes(len(_LET_IN))
            _limit_receiving(connected, 0.0)
        except BaseException:
            connection.close()
            raise
        return connection


def _limit_receiving(connected: socket.socket, seconds: float) -> None:
    """0: without a limit. The system's own, because connections of `multiprocessing` know none."""
    whole = int(seconds)
    told = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, told)


def _hang_up(connected: socket.socket) -> None:
    """Ends a connection for whoever reads from it, in whatever thread."""
    with contextlib.suppress(OSError):  # closed before
        connected.shutdown(socket.SHUT_RDWR)
