"""Tensors in a flat piece of memory, of which processes of one machine may share some. Linux; any process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable

import msgspec
import torch
from torch import Tensor

_ALIGNMENT = 64


class TensorPlace(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Place of a tensor in a flat piece of memory."""

    name: str
    """Name of the tensor in the checkpoint."""
    dtype: str
    """Name of the dtype in torch."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    offset: int
    """Bytes from the start of the memory."""


def write_flat(
    tensors: Iterable[tuple[str, Tensor]], room: Callable[[int], Tensor]
) -> tuple[list[TensorPlace], Tensor]:
    """Copies tensors behind one another into memory; returns their places, and the bytes that all take.

    Args:
        room: returns uint8, of so many bytes at least.
    """
    held = [(name, tensor.detach()) for name, tensor in tensors]
    places, end = list[TensorPlace](), 0
    for name, tensor in held:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(TensorPlace(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        end = offset + tensor.numel() * tensor.element_size()
    flat = room(end)
    for place, (_, tensor) in zip(places, held, strict=True):
        tensor_at(flat, place).copy_(tensor)
    return places, flat[:end]


def tensor_at(flat: Tensor, place: TensorPlace) -> Tensor:
    """Returns the tensor at a place in uint8 [bytes], a view of them."""
    dtype = getattr(torch, place.dtype)
    num_bytes = dtype.itemsize * int(torch.Size(place.shape).numel())
    if not num_bytes:
        return torch.empty(place.shape, dtype=dtype)
    return flat[place.offset : place.offset + num_bytes].view(dtype).view(place.shape)


class SharedMemory:
    """An anonymous file of the kernel, seen by every process that has its descriptor; gone with the last of them.

    Args:
        descriptor: of one that another process made; None for a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("moerl-weights") if descriptor is None else descriptor
        self._flat = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def of(cls, path: str) -> SharedMemory:
        """Opens the memory of another process. Raises `OSError` if there is none."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Path by which other processes of this user open the memory, as long as this process keeps it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def grown(self, num_bytes: int) -> Tensor:
        """Makes the memory as long as that, if it is shorter; returns it as `mapped` does."""
        # Never made shorter: another process may see more of it, and a write behind its end kills that process.
        if num_bytes > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, num_bytes)
        return self.mapped(num_bytes)

    def mapped(self, num_bytes: int) -> Tensor:
        """Returns the memory, uint8 of so many bytes at least; it is written over by the next bucket."""
        if num_bytes > self._flat.numel():
            # The mapping lives as long as a tensor that shows a part of it.
            self._flat = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        return self._flat

    def close(self) -> None:
        """Gives the memory up in this process."""
        self._flat = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)
