"""Copies between host and device that the host does not wait for. Runs in every trainer rank.

A copy from or to ordinary host memory stops the host until the device has come that far. These go through pinned
memory. On a CPU there is nothing to copy to: tensors own their memory all the same, so that nobody writes into a batch.
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
    """The array as a tensor on the device of this rank, there for whatever is launched next."""
    return transfer({"array": array}, platform.device())["array"]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in host memory, detached. The host waits once, for all of them."""
    if all(tensor.device == HOST for tensor in tensors):
        return [tensor.detach() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copies


class Upload:
    """Arrays on their way to the device, beside what it computes.

    Args:
        arrays: copied before this returns, as far as pinned memory.

    Keep it until the host has waited for what reads the tensors: their memory belongs to another stream.
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
        """The tensors; what is launched next on the current stream runs once they are there."""
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return self._tensors


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
