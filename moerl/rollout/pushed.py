"""Buckets of weights that a sender pushes to an engine in another process.

    the engine's process    `BucketReceiver`: hands buckets to the engine, each sender's in a thread of its own
    a sender                `PushingSink`: writes a bucket and waits until the engine has taken it

The controller begins and ends the engine's update; here are the tensors alone. On one machine they lie in memory of the
sender that both processes see, else they follow a message over a connection with a key. Messages are MessagePack, no
pickle. Strangers get no further than `moerl.processes.admission`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch import Tensor

from moerl.contract.commands import ReceiverAddress
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import MoerlError, WeightSyncError, closing
from moerl.processes.admission import Admission, connect
from moerl.rollout.shared_memory import SharedMemory, TensorPlace, tensor_at, write_flat

TakeBucket = Callable[[int, Iterable[tuple[str, Tensor]]], None]
"""Called with the version of the update and tensors by checkpoint name, which are written over after it returns."""


class _Bucket(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    places: list[TensorPlace]
    num_bytes: int
    """That the tensors take together: in the memory, or as many bytes follow."""
    memory: str = ""
    """The file that is the sender's memory, always the same; empty if bytes follow."""


class BucketReceiver:
    """A receiver of buckets for the engine of this process, until it is closed.

    Args:
        take: called for one bucket at a time, in a thread for each sender. The sender raises what `take` raises.
        host: address at which senders reach this process.
        shares_memory: True if senders run on this machine.
    """

    def __init__(self, take: TakeBucket, host: str, *, shares_memory: bool) -> None:
        self._take = take
        self._taking, self._lock = threading.Lock(), threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._admission = Admission(host, self._admit)
        self.address = ReceiverAddress(host, self._admission.port, self._admission.key, shares_memory)

    def close(self) -> None:
        """Ends the connections of all senders. Once more is harmless."""
        self._admission.close()
        with self._lock:
            self._is_closed = True
            for each in self._sockets:
                # Wakes the thread that reads from it, which closes it.
                with contextlib.suppress(OSError):  # the sender was faster
                    each.shutdown(socket.SHUT_RDWR)

    def _admit(self, connection: Connection) -> None:
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError
            self._sockets.append(socket.socket(fileno=os.dup(connection.fileno())))
            args = (connection, self._sockets[-1])
        threading.Thread(target=self._serve, args=args, name="weight-buckets", daemon=True).start()

    def _serve(self, connection: Connection, end: socket.socket) -> None:
        # The sender is gone, or this is closed.
        with connection, closing(_Room()) as room, contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            while True:
                bucket = msgspec.msgpack.decode(connection.recv_bytes(), type=_Bucket)
                connection.send_bytes(self._problem_with(bucket, room, connection).encode())
        with self._lock:
            self._sockets.remove(end)
            end.close()

    def _problem_with(self, bucket: _Bucket, room: _Room, connection: Connection) -> str:
        """Hands a bucket to the engine; returns why it was not taken, an empty text if it was."""
        try:
            flat = room.of(bucket, connection)
            with self._taking:
                self._take(bucket.version, ((place.name, tensor_at(flat, place)) for place in bucket.places))
        except Exception as error:  # noqa: BLE001 - process boundary: the sender raises it
            return str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"
        return ""


class PushingSink:
    """A `WeightSink` that pushes buckets to a `BucketReceiver`.

    Raises:
        WeightSyncError: the receiver is gone; from `receive` also what was raised there.
    """

    def __init__(self, address: ReceiverAddress) -> None:
        self._version = -1
        self._memory = SharedMemory() if address.shares_memory else None
        try:
            self._connection = connect(address.host, address.port, address.key)
        except (OSError, EOFError) as error:
            raise _gone(error) from error

    def begin_update(self, update: WeightUpdate) -> None:
        """Takes the version of the buckets that follow. The controller begins the engine's update."""
        self._version = update.version

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Pushes one bucket; returns when the engine has taken it."""
        memory = self._memory
        places, flat = write_flat(tensors, _room_of if memory is None else memory.grown)
        bucket = _Bucket(self._version, places, flat.numel(), "" if memory is None else memory.path)
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(bucket))
            if memory is None and bucket.num_bytes:
                self._connection.send_bytes(memoryview(flat.numpy()))
            problem = self._connection.recv_bytes().decode()
        except (OSError, EOFError) as error:
            raise _gone(error) from error
        if problem:
            raise WeightSyncError(problem)

    def end_update(self) -> None:
        """Does nothing: the controller ends the engine's update."""

    def abandon_update(self) -> None:
        """Does nothing: the controller abandons the engine's update."""

    def close(self) -> None:
        self._connection.close()
        if self._memory is not None:
            self._memory.close()


class _Room:
    """Memory for the buckets of one sender: the sender's own, or as much of this process's as the largest one takes."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._own = _room_of(0)

    def of(self, bucket: _Bucket, connection: Connection) -> Tensor:
        """Returns uint8 with the bytes of a bucket at its start; they are read from the connection if they follow."""
        if bucket.memory:
            self._memory = self._memory or _opened(bucket.memory)
            return self._memory.mapped(bucket.num_bytes)
        if bucket.num_bytes > self._own.numel():
            self._own = _room_of(bucket.num_bytes)
        if bucket.num_bytes:
            _read(connection, self._own[: bucket.num_bytes])
        return self._own

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


def _room_of(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _read(connection: Connection, flat: Tensor) -> None:
    try:
        num_bytes = connection.recv_bytes_into(memoryview(flat.numpy()))
    except BufferTooShort as error:
        num_bytes = len(error.args[0])
    if num_bytes != flat.numel():
        raise WeightSyncError(
            "weight update: a bucket of another length than announced",
            seen=f"{num_bytes} bytes",
            expected=f"{flat.numel()} bytes",
            remedy="run the same moerl version on both sides",
        )


def _opened(path: str) -> SharedMemory:
    try:
        return SharedMemory.of(path)
    except OSError as error:
        raise WeightSyncError(
            "weights: the engine's process cannot open the memory of a sender",
            seen=str(error),
            expected="a file under /proc that processes of one user can open",
            remedy="mount /proc, and let this user see its own processes there",
        ) from error


def _gone(error: Exception) -> WeightSyncError:
    return WeightSyncError(
        "weight update: the engine's process is gone",
        seen=str(error) or type(error).__name__,
        expected="a process that takes buckets until the run ends",
        remedy="see logs/engine.log, or the output of the controller; resume the run",
    )
