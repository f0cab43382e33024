"""An engine's sink for senders in other processes: weights over a TCP connection with a key.

    the engine's process    `SinkServer`: takes buckets and hands them to the engine, one call at a time
    a sender                `RemoteSink`: a `CheckedSink` whose every call is answered by the other side

For engines in the controller's own process. Messages are a JSON header and, with tensors, their bytes; no pickle.
An engine may take an update beside what the sender does next: its calls are answered at once, and done one by one.
Strangers get no further than `moerl.processes.admission`.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from moerl.contract.ports import CheckedSink, ReadsMemory, Taken
from moerl.errors import MoerlError, WeightSyncError
from moerl.processes.admission import Admission, connect

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALIGNMENT = 4
"""Bytes; of the widest dtype."""
_BUCKETS_AHEAD = 2
"""Buckets that were taken from a sender and not by the sink: they are copies in the memory of this process."""


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
    """One call of a sink. tensors: whose bytes follow, one after the other in one message. what: was written, where
    the sink reads memory. wait: for all calls before it."""

    do: Literal["begin", "receive", "written", "wait", "end", "abandon", "held_dtypes", "verify"]
    version: int = -1
    tensors: list[_Tensor] = []
    what: bytes = b""
    checksums: dict[str, int] = {}


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    problem: str = ""
    dtypes: dict[str, str] = {}


class SinkServer:
    """Hands what one sender says to a sink, until it is closed."""

    def __init__(self, sink: CheckedSink, host: str = "127.0.0.1") -> None:
        self._sink = sink
        self._senders: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        """Those who know the key, one after the other; None: there will be no more."""
        self._admission = Admission(host, lambda connection, _: self._senders.put(connection))
        self.address = SinkAddress(host, self._admission.port, self._admission.key)
        self._is_closed, self._socket = False, None
        self._beside: _Beside | None = None
        self._thread = threading.Thread(target=self._serve, name="weight-sink", daemon=True)
        self._thread.start()

    def take_beside(self, taken: Taken, *, verify: bool) -> None:
        """From the next update on the sender is answered before the sink has done what it asks for, two buckets ahead
        at most. Not while an update is under way.

        Args:
            taken: called in a thread of its own once the sink has the next update, with the first problem it had.
            verify: the update ends with a comparison of checksums.
        """
        if self._beside is None:
            self._beside = _Beside(self._sink)
        self._beside.expect(taken, "verify" if verify else "end")

    def close(self) -> None:
        """Ends the connection, and what the sender asks for by it."""
        self._is_closed = True
        self._admission.close()
        self._senders.put(None)
        if self._beside is not None:
            self._beside.close()
        if self._socket is not None:
            # Wakes the thread that reads from it, which closes it.
            with contextlib.suppress(OSError):  # the sender was faster
                self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while (connection := self._senders.get()) is not None:
            with connection, socket.socket(fileno=os.dup(connection.fileno())) as self._socket:
                # Closed, or a sender that is gone: what it has begun is forgotten.
                with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
                    while not self._is_closed:
                        self._answer(connection)
                self._do(_Call("abandon"), [])

    def _answer(self, connection: Connection) -> None:
        """Does one call."""
        call = msgspec.json.decode(connection.recv_bytes(), type=_Call)
        data = connection.recv_bytes() if call.tensors else b""
        try:
            answer = self._do(call, _unpacked(call.tensors, data))
        except Exception as error:  # noqa: BLE001 - process boundary: the sender raises it
            answer = _Answer(problem=_text(error))
        connection.send_bytes(msgspec.json.encode(answer))

    def _do(self, call: _Call, tensors: list[tuple[str, Tensor]]) -> _Answer:
        if self._beside is None:
            return _done(self._sink, call, tensors)
        match call.do:
            case "held_dtypes":
                return self._beside.held_dtypes()
            case "wait":
                return self._beside.wait()
            case _:
                return self._beside.do(call, tensors)


class _Beside:
    """The calls of updates, done one after the other in a thread of its own. What follows a problem is left out until
    the next update begins."""

    def __init__(self, sink: CheckedSink) -> None:
        self._sink = sink
        self._calls: queue.SimpleQueue[tuple[_Call, list[tuple[str, Tensor]]] | None] = queue.SimpleQueue()
        self._room, self._all_done = threading.Semaphore(_BUCKETS_AHEAD), threading.Event()
        self._dtypes: _Answer | None = None
        self._problem: Exception | None = None
        self._last, self._taken = "", lambda _: None
        threading.Thread(target=self._work, name="weights-beside", daemon=True).start()

    def expect(self, taken: Taken, last: str) -> None:
        """`taken` is called once the next update's call `last` is done."""
        self._problem, self._taken, self._last = None, taken, last

    def held_dtypes(self) -> _Answer:
        """Of the sink, which is asked once: an answer would wait for what it does."""
        if self._dtypes is None:
            self._dtypes = _done(self._sink, _Call("held_dtypes"), [])
        return self._dtypes

    def do(self, call: _Call, tensors: list[tuple[str, Tensor]]) -> _Answer:
        """Answers for the sink, which does it later; a problem that it had by now is the answer."""
        if call.do == "receive":
            self._room.acquire()
        self._calls.put((call, tensors))
        return self._answer()

    def wait(self) -> _Answer:
        """For what the sink was asked for until now."""
        self._all_done.clear()
        self._calls.put((_Call("wait"), []))
        self._all_done.wait()
        return self._answer()

    def close(self) -> None:
        self._calls.put(None)

    def _answer(self) -> _Answer:
        return _Answer(problem=_text(self._problem) if self._problem is not None else "")

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, tensors = asked
            try:
                if self._problem is None or call.do == "abandon":
                    _done(self._sink, call, tensors)
            except Exception as error:  # noqa: BLE001 - thread boundary: whoever is told raises it
                self._problem = error
            if call.do == "receive":
                self._room.release()
            if call.do == "wait":
                self._all_done.set()
            if call.do == self._last:
                self._taken(self._problem)


def _done(sink: CheckedSink, call: _Call, tensors: list[tuple[str, Tensor]]) -> _Answer:
    match call.do:
        case "begin":
            sink.begin_update(call.version)
        case "receive":
            sink.receive(tensors)
        case "written":
            assert isinstance(sink, ReadsMemory)
            sink.receive_written(call.what)
        case "wait":
            pass
        case "end":
            sink.end_update()
        case "abandon":
            sink.abandon_update()
        case "held_dtypes":
            return _Answer(dtypes=dict(sink.held_dtypes()))
        case "verify":
            sink.verify(call.checksums)
    return _Answer()


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"


class RemoteSink:
    """A `CheckedSink` in another process. Every call waits for the other side; whoever calls sets the deadline.

    Raises:
        WeightSyncError: from every method, what the sink there raised, or the connection is gone.
    """

    def __init__(self, address: SinkAddress) -> None:
        self._connection = connect(address.host, address.port, address.key)

    def begin_update(self, version: int) -> None:
        self._call(_Call("begin", version=version))

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        held = [(name, tensor.detach()) for name, tensor in tensors]
        told = [_Tensor(name, _dtype_name(tensor), tuple(tensor.shape)) for name, tensor in held]
        self._call(_Call("receive", tensors=told), _packed([tensor for _, tensor in held]) if held else None)

    def receive_written(self, what: bytes) -> None:
        """As `ReadsMemory.receive_written`; the memory may be written over after `wait`."""
        self._call(_Call("written", what=what))

    def wait(self) -> None:
        """Until the other side has done all of the calls before, where it answers them earlier."""
        self._call(_Call("wait"))

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
