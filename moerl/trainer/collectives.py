"""Exchange of bytes between ranks, for data that are no tensors: no object is pickled. Runs in every trainer rank.

Functions that share or gather are collectives of their group. Callers choose the encoding of the bytes: JSON or msgpack
of plain data.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.trainer import platform

Group = dist.ProcessGroup | None
"""Process group; None for all ranks."""


def device_of(group: Group = None) -> torch.device:
    """Returns the device that tensors have to be on for the group to send them."""
    is_of_devices = dist.get_backend(group) == platform.collective_backend()
    return platform.device() if is_of_devices else torch.device("cpu")


def to_tensor(data: bytes, to: torch.device) -> Tensor:
    """Returns bytes as uint8 [bytes] on a device."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(to)


def to_bytes(buffer: Tensor) -> bytes:
    return buffer.cpu().numpy().tobytes()


def share_bytes(data: bytes, group: Group = None) -> bytes:
    """Returns the bytes of the group's first rank, on every rank. data: on the first rank; ignored on others."""
    if dist.get_world_size(group) == 1:
        return data
    to = device_of(group)
    is_first = dist.get_rank(group) == 0
    length = torch.tensor([len(data) if is_first else 0], device=to)
    dist.broadcast(length, group=group, group_src=0)
    buffer = to_tensor(data, to) if is_first else torch.empty(int(length), dtype=torch.uint8, device=to)
    dist.broadcast(buffer, group=group, group_src=0)
    return to_bytes(buffer)


def gather_bytes(mine: bytes, group: Group = None) -> list[bytes]:
    """Returns the bytes of every rank in rank order, on the group's first rank; nothing on others."""
    if dist.get_world_size(group) == 1:
        return [mine]
    to = device_of(group)
    lengths = _gather_lengths(mine, group, to)
    if dist.get_rank(group) != 0:
        if mine:
            dist.send(to_tensor(mine, to), group=group, group_dst=0)
        return []
    everyone = [mine]
    for rank, length in enumerate(lengths[1:], start=1):
        buffer = torch.empty(length, dtype=torch.uint8, device=to)
        if length:
            dist.recv(buffer, group=group, group_src=rank)
        everyone.append(to_bytes(buffer))
    return everyone


def all_gather_bytes(mine: bytes, group: Group = None) -> list[bytes]:
    """Returns the bytes of every rank in rank order, on every rank; for messages that stay small with many ranks."""
    size = dist.get_world_size(group)
    if size == 1:
        return [mine]
    to = device_of(group)
    lengths = _gather_lengths(mine, group, to)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=to)
    padded[: len(mine)] = to_tensor(mine, to)
    gathered = padded.new_empty(size * len(padded))
    dist.all_gather_into_tensor(gathered, padded, group=group)
    parts = zip(gathered.view(size, -1), lengths, strict=True)
    return [to_bytes(part[:length]) for part, length in parts]


def _gather_lengths(mine: bytes, group: Group, to: torch.device) -> list[int]:
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=to)
    dist.all_gather_into_tensor(lengths, torch.tensor([len(mine)], device=to), group=group)
    return lengths.tolist()
