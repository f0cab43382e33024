"""What ranks tell one another outside of Megatron: bytes from the main rank, coordinates and per-row tables to it.

Runs in every trainer rank; every function is a collective. No pickle: frames of the wire codec and plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moerl.contract.parallel import RankCoordinates
from moerl.errors import ContractError, MoerlError
from moerl.trainer.collectives import all_gather_bytes, device_of, to_bytes, to_tensor

_FAILED = -1
"""In place of a length: the main rank has nothing to send, because it failed."""


def _to_tensor(data: bytes) -> torch.Tensor:
    """uint8 [bytes] where the backend can send it."""
    return to_tensor(data, device_of())


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device_of())


def _main_failed(length: int) -> bool:
    """True on the main rank where it announced its failure; the others stop."""
    if length == _FAILED and dist.get_rank() != 0:
        raise MoerlError("the main rank failed while preparing a batch", remedy="read the output of rank 0")
    return length == _FAILED


def _run(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


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
    length = torch.tensor([_FAILED if payload is None else len(payload)], dtype=torch.int64, device=device_of())
    dist.broadcast(length, src=0)
    if _main_failed(int(length)):
        return b""
    buffer = _to_tensor(payload or b"") if is_main else _empty(int(length))
    dist.broadcast(buffer, src=0)
    return to_bytes(buffer)


def scatter_bytes(payloads: Sequence[bytes] | None) -> bytes:
    """This rank's payload of those that the main rank gives, one per rank, sent from rank to rank.

    Args:
        payloads: on rank 0, the bytes for each rank in rank order; ignored elsewhere. None on rank 0 means that it
            failed, as in `broadcast_bytes`.

    Raises:
        MoerlError: on every other rank, where rank 0 failed; on every rank, where there is not one payload per rank.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    fits = rank != 0 or payloads is None or len(payloads) == world_size
    lengths = torch.full((world_size,), _FAILED, dtype=torch.int64, device=device_of())
    if rank == 0 and payloads is not None and fits:
        lengths = torch.tensor([len(payload) for payload in payloads], dtype=torch.int64, device=device_of())
    if world_size > 1:
        dist.broadcast(lengths, src=0)
    if not fits:
        raise MoerlError("not one payload per rank", seen=len(payloads or ()), expected=world_size)
    if _main_failed(int(lengths[rank])):
        return b""
    if rank == 0:
        assert payloads is not None
        # In one batch: single sends would make NCCL open a communicator of its own for every pair of ranks.
        _run([dist.P2POp(dist.isend, _to_tensor(data), to) for to, data in enumerate(payloads) if to and data])
        return payloads[0]
    buffer = _empty(int(lengths[rank]))
    _run([dist.P2POp(dist.irecv, buffer, 0)] if len(buffer) else [])
    return to_bytes(buffer)


def raise_together(error: ContractError | None) -> None:
    """Raises on every rank where any rank has an error, so that none waits for one that stopped: its own on a rank that
    has one, elsewhere that of the last such rank, by name."""
    rank = dist.get_rank()
    if dist.get_world_size() > 1:
        last = torch.tensor([rank if error is not None else -1], dtype=torch.int64, device=device_of())
        dist.all_reduce(last, op=dist.ReduceOp.MAX)
        if int(last) < 0:
            return
        told = _broadcast_from(int(last), msgspec.json.encode(_as_told(error)) if error is not None else b"")
        if error is None:
            reason, field, seen, expected, remedy = msgspec.json.decode(told)
            seen = f"rank {int(last)}: {seen}"
            raise ContractError(reason, field=field, seen=seen, expected=expected, remedy=remedy)
    if error is not None:
        raise error


def _as_told(error: ContractError) -> list[str | None]:
    return [str(error.reason), error.field, error.seen, error.expected, error.remedy]


def _broadcast_from(rank: int, payload: bytes) -> bytes:
    """The payload of one rank, on every rank."""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device_of())
    dist.broadcast(length, src=rank)
    buffer = _to_tensor(payload) if dist.get_rank() == rank else _empty(int(length))
    dist.broadcast(buffer, src=rank)
    return to_bytes(buffer)


def gather_layouts(layout: RankCoordinates) -> list[RankCoordinates]:
    """The coordinates of every rank, in rank order, on every rank."""
    return [msgspec.json.decode(each, type=RankCoordinates) for each in all_gather_bytes(msgspec.json.encode(layout))]


def gather_rows(rows_RC: NDArray[np.float32], group: dist.ProcessGroup | None = None) -> NDArray[np.float32]:
    """Tables of all ranks of `group` (all ranks where None), one under another in rank order.

    Args:
        rows_RC: float32 [R, C]; C agrees on all ranks, R need not.

    Returns:
        float32 [sum of R, C], on every rank.
    """
    return _gather(rows_RC, group)


def gather_words(words_RC: NDArray[np.int64]) -> NDArray[np.int64]:
    """`gather_rows` of all ranks for int64 [R, C]."""
    return _gather(words_RC, None)


def _gather(rows_RC: NDArray[Any], group: dist.ProcessGroup | None) -> NDArray[Any]:
    size = dist.get_world_size(group)
    if size == 1:
        return rows_RC
    to = device_of(group)
    mine = torch.from_numpy(np.ascontiguousarray(rows_RC)).to(to)
    counts = torch.zeros(size, dtype=torch.int64, device=to)
    dist.all_gather_into_tensor(counts, torch.tensor([len(mine)], device=to), group=group)
    padded = mine.new_zeros(int(counts.max()), mine.shape[1])
    padded[: len(mine)] = mine
    gathered = padded.new_empty(size * len(padded), mine.shape[1])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    parts = gathered.view(size, len(padded), mine.shape[1])
    return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)]).cpu().numpy()


def min_over(values: torch.Tensor) -> torch.Tensor:
    """The minimum of a CPU tensor over all ranks, on the CPU."""
    least = values.to(device_of())
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.cpu()


def sum_over(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of a CPU tensor over `group` (all ranks where None), on the CPU."""
    total = values.to(device_of(group))
    dist.all_reduce(total, group=group)
    return total.cpu()


def barrier() -> None:
    dist.barrier()
