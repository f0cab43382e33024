"""Messages between the controller and its child processes over stream sockets: two lengths, a message, and a frame or
nothing.

The controller serves many ranks at once and never blocks: `Outbox` and `Inbox`. Others wait: `send` and `receive`.
"""

from __future__ import annotations

import socket
import struct

_LENGTHS = struct.Struct("<QQ")
_READ_BYTES = 1 << 20


class Outbox:
    """Bytes that are still to be sent to one rank."""

    def __init__(self) -> None:
        self._parts: list[memoryview] = []

    def put(self, message: bytes, frame: bytes = b"") -> None:
        parts = (_LENGTHS.pack(len(message), len(frame)), message, frame)
        self._parts += [memoryview(part) for part in parts if part]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def flush(self, connection: socket.socket) -> None:
        """Sends what the socket takes at once."""
        while self._parts:
            try:
                sent = connection.send(self._parts[0])
            except BlockingIOError:
                return
            self._parts[0] = self._parts[0][sent:]
            if not self._parts[0]:
                del self._parts[0]


class Inbox:
    """Bytes that have come from one rank. Raises `EOFError` if the rank has closed its end."""

    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, connection: socket.socket) -> list[bytes]:
        """Reads what has come, without waiting, and returns the messages that are whole now."""
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._data += data
        messages = []
        while len(self._data) >= _LENGTHS.size:
            length, frame_length = _LENGTHS.unpack_from(self._data)
            end = _LENGTHS.size + length + frame_length
            if len(self._data) < end:
                break
            messages.append(bytes(self._data[_LENGTHS.size : _LENGTHS.size + length]))
            del self._data[:end]
        return messages


def send(connection: socket.socket, message: bytes, frame: bytes = b"") -> None:
    """Sends one message; returns when the system has buffered it."""
    connection.sendall(_LENGTHS.pack(len(message), len(frame)) + message)
    if frame:
        connection.sendall(frame)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Waits for the next message and its frame. Raises `EOFError` if the other side has closed its end."""
    length, frame_length = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    return _read(connection, length), _read(connection, frame_length)


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return bytes(data)
