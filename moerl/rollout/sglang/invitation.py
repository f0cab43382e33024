"""Invitation of a server to a process group in which it takes weights, together with others. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

PIECE_BYTES = 1 << 20
"""Bytes of a piece of a bucket; servers pass pieces on to one another."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Into one group of a sender, which is rank 0, and servers.

    first_rank: of this server; its other ranks follow. first_ranks: of all servers, in their order in the chain.
    seconds: for joining, and for every piece.
    """

    address: str
    port: int
    group_name: str
    backend: str
    world_size: int
    first_rank: int
    first_ranks: tuple[int, ...]
    piece_bytes: int
    seconds: float
