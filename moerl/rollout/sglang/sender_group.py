"""The sender's end of a process group that it shares with the ranks of several receivers.

Runs in the sender's process, rank 0 of the group. With gloo, receivers form a chain: each passes pieces of a bucket on
to the next one (`patches/sglang`, 0015, is their end of it). With NCCL one broadcast of the whole group does that.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    _new_process_group_helper,  # pyright: ignore[reportPrivateUsage]
    _world,  # pyright: ignore[reportPrivateUsage]
)

from moerl.processes.loop_thread import in_thread, run_in_daemon
from moerl.rollout.sglang.invitation import PIECE_BYTES, Invitation

_POLL_SECONDS = 5e-4
_PIECES_SHARE = 0.25
"""Share of a bucket's time limit that one piece may take, and that forming a group may take."""
LOST_RANK = re.compile(r"weight relay: rank (?P<rank>\d+) is (?P<state>late|gone)")
"""In an error of the sender or of a receiver: a rank that it waited for in vain was late, or its connection closed."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Settings of a group."""

    address: str
    """Address of this machine, as receivers reach it."""
    backend: str
    """gloo or nccl."""
    device: torch.device
    """Device that NCCL sends from."""
    seconds: float
    """Seconds that each bucket may take."""

    @property
    def piece_seconds(self) -> float:
        """Seconds that a piece (NCCL: a bucket) may take, and making the group."""
        return self.seconds * _PIECES_SHARE


class SenderGroup:
    """One process group.

    Attributes:
        invitations: of the receivers, in their order in the chain.
    """

    def __init__(self, options: GroupOptions, num_ranks: Sequence[int]) -> None:
        """Listens for the receivers. num_ranks: of each."""
        *firsts, world_size = accumulate(num_ranks, initial=1)
        self._options, self._world_size = options, world_size
        self._name = f"moerl-{secrets.token_hex(8)}"
        self._group: Any = None
        # Listening on the one address that receivers reach us at; by itself the store would listen on all.
        address = options.address
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=options.piece_seconds)
        self._server = TCPStore(
            address, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        # Receivers put their keys under this prefix; without it both sides wait for ever.
        self._store = PrefixStore(self._name, self._server)
        self.invitations = tuple(
            Invitation(
                master_address=address,
                master_port=port,
                group_name=self._name,
                backend=options.backend,
                world_size=world_size,
                rank_offset=first,
                relay_first_ranks=tuple(firsts),
                relay_piece_bytes=PIECE_BYTES,
                relay_seconds=options.piece_seconds,
            )
            for first in firsts
        )

    def form(self) -> None:
        """Returns when all receivers have joined, with NCCL at once. Raises RuntimeError if that takes too long."""
        group, _ = _new_process_group_helper(
            self._world_size,
            0,
            [],
            Backend(self._options.backend),
            self._store,
            group_name=self._name,  # pyright: ignore[reportArgumentType]
            timeout=timedelta(seconds=self._options.piece_seconds),
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self._world_size)}  # pyright: ignore[reportArgumentType]
        self._group = group

    def has_come(self, receiver: int) -> bool:
        """Returns whether all ranks of a receiver have found our store."""
        bounds = [*self.invitations[0].relay_first_ranks, self._world_size]
        return self._store.check([f"joined/{rank}" for rank in range(bounds[receiver], bounds[receiver + 1])])

    def owner(self, rank: int) -> int:
        """Returns the receiver that a rank is of; -1 for the sender's."""
        return sum(invitation.rank_offset <= rank for invitation in self.invitations) - 1

    async def push(self, flat: Tensor) -> None:
        """Sends a bucket, uint8 [bytes], to all receivers. Raises RuntimeError if that fails; the group is then of no
        more use."""
        if self._options.backend != "gloo":
            # The first broadcast blocks until all ranks are there.
            await in_thread(lambda: self._broadcast(flat.to(self._options.device)))
            return
        # gloo sends from host memory; a piece waits, in gloo's own thread, until the receiver asks for it.
        pieces = flat.cpu().split(PIECE_BYTES)
        try:
            works = [self._group.send([piece], 1, 0) for piece in pieces]
        except RuntimeError as error:
            raise self._lost(error, 0.0) from error
        await in_thread(lambda: self._wait(works))

    def leave(self) -> None:
        """Gives the group up; receivers are not told."""
        group, self._group = self._group, None
        if group is not None:
            # With NCCL, what is under way never ends: nobody waits here.
            run_in_daemon(partial(dist.destroy_process_group, group))

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            start = time.monotonic()
            try:
                work.wait(timedelta(seconds=self._options.piece_seconds))
            except RuntimeError as error:
                raise self._lost(error, time.monotonic() - start) from error

    def _lost(self, error: RuntimeError, waited_seconds: float) -> RuntimeError:
        state = "late" if waited_seconds >= 0.9 * self._options.piece_seconds else "gone"
        return RuntimeError(f"weight relay: rank 1 is {state}: {error}")

    def _broadcast(self, flat: Tensor) -> None:
        until = time.monotonic() + self._options.piece_seconds
        work = dist.broadcast(flat, group_src=0, group=self._group, async_op=True)
        assert work is not None
        while not work.is_completed():  # `wait` only orders streams
            if time.monotonic() >= until:
                raise RuntimeError(f"weight relay: rank 1 is late: no broadcast for {self._options.piece_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        work.wait()


def flattened(bucket: Sequence[tuple[str, Tensor]]) -> Tensor:
    """Returns uint8 [bytes of all]: a copy of the tensors behind one another."""
    return torch.cat([_bytes_of(tensor) for _, tensor in bucket])


def flat_view(bucket: Sequence[tuple[str, Tensor]]) -> Tensor | None:
    """Returns uint8 [bytes of all]: the memory of tensors that lie behind one another; None if they do not."""
    if not all(tensor.is_contiguous() for _, tensor in bucket):
        return None
    parts = [_bytes_of(tensor) for _, tensor in bucket]
    first, size = parts[0], sum(part.numel() for part in parts)
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += part.numel()
    return first.as_strided((size,), (1,))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
