"""Copies of host arrays to a device without waiting for it. Any process that computes with torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes that vector loads of a GPU need."""

HOST, NOWHERE = torch.device("cpu"), torch.device("meta")


def transfer(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copies arrays to `device`, in one transfer, and returns tensors of their shapes and dtypes by name.

    To a GPU from pinned memory, in stream order: the host does not wait. On a CPU the tensors are copies too.
    """
    starts, total = {}, 0
    for name, array in arrays.items():
        starts[name] = total
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device not in (HOST, NOWHERE))
    into = packed.numpy()
    for name, array in arrays.items():
        into[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = packed.to(device, non_blocking=True)

    def tensor(name: str, array: NDArray[Any]) -> Tensor:
        part = sent[starts[name] : starts[name] + array.nbytes]
        return part.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)

    return {name: tensor(name, array) for name, array in arrays.items()}


def under(sent: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): each for name, each in sent.items() if name.startswith(prefix)}
