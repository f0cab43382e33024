"""Device memory of a model that is freed while servers work on the device. Runs in every trainer rank.

Tensors and their views stay the same objects; their memory is freed, and allocated again later. Nobody may read a
tensor in between: the trainer takes the memory back in every method that needs it. On a CPU torch cannot free memory
that numpy has seen: the memory stays and is filled with NaN instead, so that the same mistakes are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moerl.kernels.transfer import HOST
from moerl.trainer import platform

SLAB_BYTES = 2**28
"""Bytes of one allocation of pinned memory: a power of two, to which torch rounds them up."""

_NAN_BYTE = 0xFF


class DeviceMemory:
    """The memory of some tensors on the device.

    Args:
        tensors: of any shape and dtype; views of one memory count once.
        kept: True if their values go to pinned host memory, and come back; else they come back as zeros.
    """

    def __init__(self, tensors: Iterable[Tensor], *, kept: bool) -> None:
        storages = {each.untyped_storage().data_ptr(): each for each in tensors if each.untyped_storage().nbytes()}
        self._bytes: list[Tensor] = []
        for each in storages.values():
            whole = torch.empty(0, dtype=torch.uint8, device=each.device)
            self._bytes.append(whole.set_(each.untyped_storage()))
        self._kept, self._is_there = kept, True
        self._host: list[Tensor] = []

    def give_back(self) -> None:
        """Frees the memory; values that are kept are in host memory when this returns."""
        if not self._is_there:
            return
        if self._kept:
            parts = self._parts()
            if not self._host:
                self._host = list(host_tensors([len(part) for part in parts], torch.uint8))
            for part, host in zip(parts, self._host, strict=True):
                host.copy_(part, non_blocking=True)
        if platform.device() != HOST:
            # The copies, and kernels launched before, may still read the memory.
            torch.cuda.current_stream().synchronize()
        for whole in self._bytes:
            if whole.is_cuda:
                whole.untyped_storage().resize_(0)
            else:
                whole.fill_(_NAN_BYTE)
        self._is_there = False

    def take_back(self) -> None:
        """Allocates the memory again, with the values that were kept, or zeros."""
        if self._is_there:
            return
        for whole in self._bytes:
            if whole.is_cuda:
                whole.untyped_storage().resize_(len(whole))
            if not self._kept:
                whole.zero_()
        if self._kept:
            for part, host in zip(self._parts(), self._host, strict=True):
                part.copy_(host, non_blocking=True)
        self._is_there = True

    def _parts(self) -> list[Tensor]:
        return [part for whole in self._bytes for part in whole.split(SLAB_BYTES)]


def host_tensors(lengths: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields tensors in host memory of these lengths, pinned if there is a device. They are cut from few allocations,
    of `SLAB_BYTES` unless one tensor is longer."""
    left, slab = sum(lengths), torch.empty(0)
    for length in lengths:
        if len(slab) < length:
            size = max(length, min(left, SLAB_BYTES // dtype.itemsize))
            slab = torch.empty(size, dtype=dtype, pin_memory=platform.device() != HOST)
        yield slab[:length]
        slab, left = slab[length:], left - length
