"""Invitation of a server to a process group in which it takes weights, together with others. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

PIECE_BYTES = 1 << 20
"""Bytes of a piece of a bucket; servers pass pieces on to one another."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Invitation of one server into a group of a sender, which is rank 0 there, and servers: the body of the call that
    has the server join."""

    master_address: str
    """Address of the sender, at which it listens."""
    master_port: int
    """Port at which it listens."""
    group_name: str
    """Name of the group, used once."""
    backend: str
    """gloo or nccl."""
    world_size: int
    """Ranks of the group, the sender's included."""
    rank_offset: int
    """First rank of this server; its other ranks follow."""
    relay_first_ranks: tuple[int, ...]
    """First ranks of all servers, in their order in the chain."""
    relay_piece_bytes: int
    """Bytes of a piece of a bucket; the last one may be shorter."""
    relay_seconds: float
    """Seconds for joining, and for every piece."""
