"""The one place where callers are let in over TCP: only those who prove that they know a key. Standard library alone.

    the listener       `Admission`: a thread for each caller's handshake; hands on connections of callers with the key
    a caller           `connect`

Strangers can call, too. A stranger who sends nothing, half of a handshake or something else costs a thread for a few
seconds, and keeps nobody else out.
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
"""Longest time of a whole handshake; between processes of a run it takes milliseconds."""
CONNECT_SECONDS = 60.0
"""Longest time of a caller, who tries again if it was turned away."""
MAX_HANDSHAKES = 64
"""Most handshakes at the same time. The oldest one makes room for one more caller."""
_LET_IN = b"#IN"
_PAUSE_SECONDS = 0.1
"""Time before listening goes on if the system could not accept a caller, for want of descriptors for example."""


class Admission:
    """A listening socket. Callers are heard side by side, each in a thread of its own.

    Args:
        host: address to listen at, on a free port.
        admit: called with the connection of a caller, in its thread; OSError refuses the caller.

    Attributes:
        key: 32 random bytes that callers have to know; made here.
        port: that it listens at.
    """

    def __init__(self, host: str, admit: Callable[[Connection], None]) -> None:
        self._admit = admit
        self.key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_HANDSHAKES)
        self.port = int(self._listener.getsockname()[1])
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._heard: dict[int, tuple[socket.socket, float]] = {}
        """By number, in the order of their coming: callers whose handshake is under way, and the time that ends it."""
        self._is_closed = False
        threading.Thread(target=self._listen, name="admission", daemon=True).start()

    def close(self) -> None:
        """Stops listening, and turns away callers who have not been let in. A second call does nothing."""
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
        """Hangs up callers whose time is over; returns the seconds until the next one is late, None without callers."""
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
            # The thread reads from a descriptor of its own; other threads can hang up the first one.
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
        """Hands the connection on if the caller knows the key and was in time; closes it otherwise."""
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            with self._lock:
                was_heard = self._heard.pop(number, None) is not None and not self._is_closed
            if not was_heard:
                raise ConnectionAbortedError("it took too long")
            connection.send_bytes(_LET_IN)
            self._admit(connection)
        except (AuthenticationError, OSError, EOFError, ValueError):
            # The caller is a stranger, or gone.
            connection.close()
        finally:
            self._forget(number, caller)


def connect(host: str, port: int, key: bytes, *, seconds: float = CONNECT_SECONDS) -> Connection:
    """Returns a connection to an `Admission`.

    Args:
        seconds: longest time until the connection is accepted, and of each message of the handshake.

    Raises:
        OSError: nobody listens there, or it takes too long.
        EOFError: the listener turned this caller away for all of `seconds`.
        AuthenticationError: one side does not know the key.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return _connect(host, port, key, seconds)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            # The listener had to make room for others.
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_SECONDS)


def _connect(host: str, port: int, key: bytes, seconds: float) -> Connection:
    with socket.create_connection((host, port), timeout=seconds) as connected:
        connected.settimeout(None)
        _limit_receiving(connected, seconds)
        connection = Connection(connected.dup().detach())
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            # The answer shows that the listener did not have to make room.
            connection.recv_bytes(len(_LET_IN))
            _limit_receiving(connected, 0.0)
        except BaseException:
            connection.close()
            raise
        return connection


def _limit_receiving(connected: socket.socket, seconds: float) -> None:
    """Limits the time of each read by a socket option: connections of `multiprocessing` have no limit. 0 = no limit."""
    whole = int(seconds)
    told = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, told)


def _hang_up(connected: socket.socket) -> None:
    """Ends a connection, also for a thread that waits to read from it."""
    with contextlib.suppress(OSError):  # closed before
        connected.shutdown(socket.SHUT_RDWR)
