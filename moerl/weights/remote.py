"""An engine's sink for senders in other processes: weights over a TCP connection with a key.

    the engine's process    `SinkServer`: takes buckets and hands them to the engine, one call at a time
    a sender                `RemoteSink`: a `CheckedSink` whose every call is answered by the other side

For engines in the controller's own process. Messages are a JSON header and, with tensors, their bytes; no pickle.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from moerl.contract.ports import CheckedSink
from moerl.errors import MoerlError, WeightSyncError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALIGNMENT = 4
"""Bytes; of the widest dtype."""


class SinkAddress(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Where a `SinkServer` listens, and the key that it knows senders by."""

    host: str
    port: int
    key: bytes


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, ...]


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    """One call of a sink. tensors: whose bytes follow, one after the other in one message."""

    do: Literal["begin", "receive", "end", "abandon", "held_dtypes", "verify"]
    version: int = -1
    tensors: list[_Tensor] = []
    checksums: dict[str, int] = {}


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    problem: str = ""
    dtypes: dict[str, str] = {}


class SinkServer:
    """Hands what one sender says to a sink, until it is closed."""

    def __init__(self, sink: CheckedSink, host: str = "127.0.0.1") -> None:
        self._sink, key = sink, secrets.token_bytes(32)
        self._listener = Listener((host, 0), authkey=key)
        address: Any = self._listener.address
        self.address = SinkAddress(address[0], address[1], key)
        self._is_closed, self._socket = False, None
        self._thread = threading.Thread(target=self._serve, name="weight-sink", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the connection, and what the sender asks for by it."""
        self._is_closed = True
        self._listener.close()
        if self._socket is not None:
            # Wakes the thread that reads from it, which closes it.
            with contextlib.suppress(OSError):  # the sender was faster
                self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                with self._listener.accept() as connection, socket.fromfd(*_kind(connection)) as self._socket:
                    self._answer(connection)
            except (AuthenticationError, OSError, EOFError, msgspec.MsgspecError):
                # A stranger, a sender that is gone, or closed meanwhile: what was open is forgotten.
                self._sink.abandon_update()

    def _answer(self, connection: Connection) -> None:
        while True:
            call = msgspec.json.decode(connection.recv_bytes(), type=_Call)
            data = connection.recv_bytes() if call.tensors else b""
            try:
                answer = self._do(call, _unpacked(call.tensors, data))
            except Exception as error:  # noqa: BLE001 - process boundary: the sender raises it
                known = isinstance(error, MoerlError)
                answer = _Answer(problem=str(error) if known else f"{type(error).__name__}: {error}")
            connection.send_bytes(msgspec.json.encode(answer))

    def _do(self, call: _Call, tensors: list[tuple[str, Tensor]]) -> _Answer:
        match call.do:
            case "begin":
                self._sink.begin_update(call.version)
            case "receive":
                self._sink.receive(tensors)
            case "end":
                self._sink.end_update()
            case "abandon":
                self._sink.abandon_update()
            case "held_dtypes":
                return _Answer(dtypes=dict(self._sink.held_dtypes()))
            case "verify":
                self._sink.verify(call.checksums)
        return _Answer()


class RemoteSink:
    """A `CheckedSink` in another process. Every call waits for the other side; whoever calls sets the deadline.

    Raises:
        WeightSyncError: from every method, what the sink there raised, or the connection is gone.
    """

    def __init__(self, address: SinkAddress) -> None:
        self._connection = Client((address.host, address.port), authkey=address.key)

    def begin_update(self, version: int) -> None:
        self._call(_Call("begin", version=version))

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        held = [(name, tensor.detach()) for name, tensor in tensors]
        told = [_Tensor(name, _dtype_name(tensor), tuple(tensor.shape)) for name, tensor in held]
        self._call(_Call("receive", tensors=told), _packed([tensor for _, tensor in held]) if held else None)

    def end_update(self) -> None:
        self._call(_Call("end"))

    def abandon_update(self) -> None:
        self._call(_Call("abandon"))

    def held_dtypes(self) -> Mapping[str, str]:
        return self._call(_Call("held_dtypes")).dtypes

    def verify(self, sent: Mapping[str, int]) -> None:
        self._call(_Call("verify", checksums=dict(sent)))

    def _call(self, call: _Call, payload: memoryview | None = None) -> _Answer:
        try:
            self._connection.send_bytes(msgspec.json.encode(call))
            if payload is not None:
                self._connection.send_bytes(payload)
            answer = msgspec.json.decode(self._connection.recv_bytes(), type=_Answer)
        except (OSError, EOFError) as error:
            raise WeightSyncError(
                f"weight update: the engine's process is gone in {call.do!r}",
                seen=str(error) or type(error).__name__,
                remedy="read the output of the controller",
            ) from error
        if answer.problem:
            raise WeightSyncError(answer.problem)
        return answer


def _kind(connection: Connection) -> tuple[int, socket.AddressFamily, socket.SocketKind]:
    return connection.fileno(), socket.AF_INET, socket.SOCK_STREAM


def _dtype_name(tensor: Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch.")


def _packed(tensors: Sequence[Tensor]) -> memoryview:
    """Their bytes behind one another, each at a multiple of `_ALIGNMENT`."""
    flat = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        flat += [data, data.new_zeros(-len(data) % _ALIGNMENT)]
    return memoryview(torch.cat(flat).cpu().numpy())


def _unpacked(told: Sequence[_Tensor], data: bytes) -> list[tuple[str, Tensor]]:
    """Tensors that lie in the bytes of a message, as `_packed` put them there.

    Raises:
        WeightSyncError: there are more bytes or fewer.
    """
    sizes = [math.prod(each.shape) * _DTYPES[each.dtype].itemsize for each in told]
    padded = [size + -size % _ALIGNMENT for size in sizes]
    if len(data) != sum(padded):
        raise WeightSyncError(
            "weight update: tensors of another length than announced",
            seen=f"{len(data)} bytes",
            expected=f"{sum(padded)} bytes",
            remedy="run the same moerl version on both sides",
        )
    # torch wants memory that may be written to.
    parts = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).split(padded) if told else ()
    return [
        (each.name, part[:size].view(_DTYPES[each.dtype]).view(each.shape))
        for each, size, part in zip(told, sizes, parts, strict=True)
    ]
