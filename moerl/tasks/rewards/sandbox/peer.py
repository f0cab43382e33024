"""Questions and answers between the process of a program and that of its tests. Runs in the sandbox, in both.

A message is its length and JSON. A question is ``["ask", operation, arguments, named arguments]``; its answer is
``["value", value]``, with the arguments again if the operation has changed them, ``["raise", ...]`` or ``["stop"]``.
A process that waits for an answer answers questions meanwhile, so functions may call back.
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from typing import Any

from moerl.tasks.rewards.sandbox.values import Wire, describe

MAX_MESSAGE_BYTES = 16 << 20
_LENGTH_BYTES = 4


class PeerGoneError(BaseException):
    """Loss of the other process, or a message of another form. No `Exception`: tests must not catch it by accident."""


class Border(ABC):
    """Border to the other process: one end of the two pipes, and the objects that were handed over, by number.

    Args:
        reading, writing: descriptors.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        # Threads of a program may call functions of the tests.
        self._lock = threading.RLock()
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    @abstractmethod
    def _done(self, operation: str, arguments: Wire, named: Wire) -> list[Wire]:
        """Does an operation that the other side asks for; returns the answer. May raise anything."""

    @abstractmethod
    def _export(self, value: Any) -> Wire:
        """Returns the wire form of an object that does not cross as a copy."""

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _exchange(self, operation: str, arguments: Wire, named: Wire) -> list[Wire]:
        """Asks, answers what the other side asks meanwhile, and returns the answer."""
        with self._lock:
            self.write(["ask", operation, arguments, named])
            while (message := self.read())[0] == "ask":
                self._answer_to(message)
            return message

    def serve(self) -> None:
        """Answers questions until the other side is gone, which raises."""
        while True:
            self._answer_to(self.read())

    def write(self, message: list[Wire]) -> None:
        """Sends a message.

        Raises:
            ValueError: the message is too long or too deep.
            PeerGoneError: the other process has ended.
        """
        try:
            content = json.dumps(message).encode()
        except RecursionError as error:
            raise ValueError("a value that is too deep") from error
        if len(content) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(content):,} bytes crosses no border; {MAX_MESSAGE_BYTES:,} at most")
        data = len(content).to_bytes(_LENGTH_BYTES, "big") + content
        try:
            while data:
                data = data[os.write(self._writing, data) :]
        except OSError as error:
            raise PeerGoneError(str(error)) from error

    def read(self) -> list[Any]:
        """Waits for the next message. Raises `PeerGoneError`."""
        size = int.from_bytes(self._exactly(_LENGTH_BYTES), "big")
        if size > MAX_MESSAGE_BYTES:
            raise PeerGoneError(f"a message of {size:,} bytes")
        try:
            message = json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise PeerGoneError(f"a message that is no JSON: {error}") from error
        if not isinstance(message, list) or not message:
            raise PeerGoneError("a message of an unknown form")
        return message

    def _answer_to(self, message: list[Any]) -> None:
        if len(message) != 4 or message[0] != "ask" or not isinstance(message[1], str):
            raise PeerGoneError("a question of an unknown form")
        try:
            answer = self._done(*message[1:])
        except PeerGoneError:
            raise
        except BaseException as error:  # noqa: BLE001 - process boundary: the other side raises it
            is_end = isinstance(error, StopIteration) and message[1] == "__next__"
            answer = ["stop"] if is_end else describe(error, self._number, self._export)
        try:
            self.write(answer)
        except ValueError as error:
            self.write(["raise", [["builtins", "ValueError"]], ["list", str(error)], None])

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = os.read(self._reading, min(size - len(data), 1 << 20))
            except OSError as error:
                raise PeerGoneError(str(error)) from error
            if not part:
                raise PeerGoneError("its end of the pipe is closed")
            data += part
        return bytes(data)
