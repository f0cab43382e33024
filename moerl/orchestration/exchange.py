"""What ranks tell one another outside of Megatron: bytes from the main rank, per-row tables to it.

Runs in every trainer rank; every function is a collective. No pickle: frames of the wire codec and plain tensors.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moerl.errors import MoerlError


def _device(group: dist.ProcessGroup | None = None) -> torch.device:
    backend = dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def broadcast_bytes(payload: bytes | None) -> bytes:
    """The main rank's payload, on every rank.

    Args:
        payload: the bytes on rank 0; ignored elsewhere. None on rank 0 means that it failed: the others stop too,
            and rank 0, whose own error is on its way, gets empty bytes.

    Raises:
        MoerlError: on every other rank, where rank 0 failed.
    """
    if dist.get_world_size() == 1:
        return payload or b""
    is_main = dist.get_rank() == 0
    length = torch.tensor([-1 if payload is None else len(payload)], dtype=torch.int64, device=_device())
    dist.broadcast(length, src=0)
    if int(length) < 0 and is_main:
        return b""
    if int(length) < 0:
        raise MoerlError("the main rank failed while preparing a batch", remedy="read the output of rank 0")
    buffer = torch.empty(int(length), dtype=torch.uint8, device=_device())
    if is_main:
        buffer.copy_(torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()


def gather_rows(rows_RC: NDArray[np.float32], group: dist.ProcessGroup | None = None) -> NDArray[np.float32]:
    """Tables of all ranks of `group` (all ranks where None), one under another in rank order.

    Args:
        rows_RC: float32 [R, C]; C agrees on all ranks, R need not.

    Returns:
        float32 [sum of R, C], on every rank.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return rows_RC
    to = _device(group)
    mine = torch.from_numpy(np.ascontiguousarray(rows_RC)).to(to)
    counts = torch.zeros(size, dtype=torch.int64, device=to)
    dist.all_gather_into_tensor(counts, torch.tensor([len(mine)], device=to), group=group)
    padded = mine.new_zeros(int(counts.max()), mine.shape[1])
    padded[: len(mine)] = mine
    gathered = padded.new_empty(size * len(padded), mine.shape[1])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    parts = gathered.view(size, len(padded), mine.shape[1])
    return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)]).cpu().numpy()


def sum_over(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of a CPU tensor over `group`, on the CPU."""
    total = values.to(_device(group))
    dist.all_reduce(total, group=group)
    return total.cpu()


def barrier() -> None:
    dist.barrier()
