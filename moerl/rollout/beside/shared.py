"""Memory that the engine's process shares with whoever sends it weights. Linux; any process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from moerl.rollout.beside.messages import Place

_ALIGNMENT = 64


class Written(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors that lie in shared memory of so many bytes."""

    places: list[Place]
    num_bytes: int


encode_written = msgspec.msgpack.Encoder().encode
decode_written = msgspec.msgpack.Decoder(Written).decode


class SharedMemory:
    """An anonymous file of the kernel, seen by every process that has its descriptor; gone with the last of them.

    Args:
        descriptor: of one that another process made; None for a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("moerl-weights") if descriptor is None else descriptor
        self.num_bytes = 0
        self._bytes: Tensor | None = None

    @classmethod
    def of(cls, path: str) -> SharedMemory:
        """That of another process. `OSError` where there is none."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where other processes of this user find it, as long as this one keeps it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def put(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Place]:
        """Copies tensors in, from the start of the memory; it grows as needed."""
        held = [(name, tensor.detach()) for name, tensor in tensors]
        places, end = list[Place](), 0
        for name, tensor in held:
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            places.append(Place(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            end = offset + tensor.numel() * tensor.element_size()
        self._hold(end)
        for place, (_, tensor) in zip(places, held, strict=True):
            self.view(place).copy_(tensor)
        return places

    def _hold(self, num_bytes: int) -> None:
        """Makes room for so many bytes. Never makes the file shorter: another process may see more of it, and a write
        behind its end kills that process."""
        if num_bytes > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, num_bytes)
        self.map(num_bytes)

    def map(self, num_bytes: int) -> None:
        """Sees so many bytes from now on."""
        if num_bytes > self.num_bytes:
            # The mapping lives as long as a tensor that shows a part of it.
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
            self.num_bytes = num_bytes

    def content(self) -> bytes:
        """A copy of everything in it."""
        return b"" if self._bytes is None else self._bytes.numpy().tobytes()

    def fill(self, content: bytes) -> None:
        """Makes the content that of another one; it grows as needed."""
        self._hold(len(content))
        if content:
            assert self._bytes is not None
            self._bytes.numpy()[: len(content)] = memoryview(content)

    def view(self, place: Place) -> Tensor:
        """The tensor at a place; it is written over by the next `put`."""
        dtype = getattr(torch, place.dtype)
        num_bytes = dtype.itemsize * int(torch.Size(place.shape).numel())
        assert self._bytes is not None or not num_bytes
        if self._bytes is None or not num_bytes:
            return torch.empty(place.shape, dtype=dtype)
        return self._bytes[place.offset : place.offset + num_bytes].view(dtype).view(place.shape)

    def close(self) -> None:
        """Gives the memory up in this process."""
        self._bytes = None
        os.close(self.descriptor)
