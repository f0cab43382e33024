"""Copies between host and device that the host does not wait for. Runs in every trainer rank.

A copy from or to ordinary host memory stops the host until the device has done it. These copies go through pinned
memory. On a CPU `to_device` copies, too, so that nobody writes into a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.kernels.transfer import HOST, transfer
from moerl.trainer import platform


def to_device(array: NDArray[Any]) -> Tensor:
    """Returns the array as a tensor on the device of this rank; kernels that are launched next can read it."""
    return transfer({"array": array}, platform.device())["array"]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors in host memory, detached. The host waits once, for all of them."""
    if all(tensor.device == HOST for tensor in tensors):
        return [tensor.detach() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copies


class Upload:
    """Copy of arrays to the device during its computations.

    Args:
        arrays: copied to pinned memory before the constructor returns.

    Keep this object until the host has waited for the kernels that read the tensors: their memory belongs to another
    stream.
    """

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._ready: Any = None
        device, named = platform.device(), {str(number): array for number, array in enumerate(arrays)}
        if device == HOST:
            self._tensors = list(transfer(named, device).values())
            return
        stream = _copy_stream(device)
        with torch.cuda.stream(stream):
            self._tensors = list(transfer(named, device).values())
            self._ready = stream.record_event()

    def arrive(self) -> list[Tensor]:
        """Returns the tensors; kernels that are launched next on the current stream wait for them."""
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return self._tensors


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
