"""Gathering buckets: every part of a bucket goes to the bucket's sender, and nowhere else. Runs in every trainer rank.

All senders gather at the same time, the k-th bucket of each in round k. Transfers of all ranks have one order (round,
turn, sender) and every rank works through its own in that order with a few under way, so that the first unfinished
transfer of all can always go on: no order of arrival can make ranks wait for one another in a circle.

Only point-to-point operations are used, which gloo and NCCL have. A chunk of one piece is sent
from the weights, others are packed. One that is whole in the bucket is received there; the sender puts others in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.weights.bucket import DTYPES, WeightBucket, contiguous_span, place, shard_bytes, unpack
from moerl.weights.peers import Peers
from moerl.weights.plan import CHUNKS_IN_FLIGHT, Bucket, SyncPlan
from moerl.weights.tensors import Piece

TakeSlot = Callable[[int], Tensor]
"""Function that returns room for a bucket of so many bytes, uint8."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A chunk that travels between two ranks. span: its first and last byte (exclusive) in the bucket; None if it is
    not in one piece there."""

    source: int
    bucket: Bucket
    pieces: tuple[Piece, ...]
    num_bytes: int
    span: tuple[int, int] | None

    def doing(self, rank: int) -> str:
        """Returns words for errors on the part of `rank` in the transfer."""
        how, peer = ("receives from", self.source) if rank == self.bucket.sender else ("sends to", self.bucket.sender)
        return f"{self.bucket.label}: rank {rank} {how} rank {peer}"


@dataclass(frozen=True, slots=True)
class _Round:
    """A rank's part in one round. bucket: that which the rank sends, if any. own_pieces: pieces of this bucket in the
    rank's own shards."""

    bucket: Bucket | None
    own_pieces: tuple[Piece, ...]
    transfers: tuple[_Transfer, ...]


class SenderGather:
    """Gatherer by point-to-point transfers, for all updates of one plan.

    Attributes:
        received_bytes: bytes that this rank received in the last update.
    """

    def __init__(self, plan: SyncPlan, peers: Peers) -> None:
        rank, device = peers.rank, peers.device
        self._peers, self._rank, self._device = peers, rank, device
        self._dtype = DTYPES[plan.options.item_bytes]
        self._rounds = [_part_of(rank, buckets, plan.options.chunk_bytes) for buckets in plan.rounds()]
        self._ring = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(CHUNKS_IN_FLIGHT)]
        self._chunks_used = 0
        self._arrived: deque[tuple[_Transfer, dist.Work | None, Callable[[], None]]] = deque()
        self._until = 0.0
        self.received_bytes = 0

    def gather(self, shards: Mapping[str, Tensor], take_slot: TakeSlot) -> Iterator[WeightBucket | None]:
        """Yields once per round: the bucket that this rank gathered, None if it is no sender in that round.

        A collective: every rank iterates to the end. A bucket's bytes are those of its slot from `take_slot`.

        Args:
            shards: this rank's weights, by the names of the plan.

        Raises:
            WeightSyncError: a rank is gone or takes too long; names the bucket and the rank.
        """
        self.received_bytes = 0
        for part in self._rounds:
            mine, self._until = None, self._peers.until()
            if part.bucket is not None:
                mine = WeightBucket(part.bucket, take_slot(part.bucket.num_bytes), self._dtype)
            rows = mine.rows() if mine is not None else {}
            for transfer in part.transfers:
                if len(self._arrived) == CHUNKS_IN_FLIGHT:
                    self._finish_one()
                if transfer.source == self._rank:
                    self._send(transfer, shards)
                else:
                    assert mine is not None
                    self._receive(transfer, mine.flat, rows)
            for piece in part.own_pieces:
                place(rows, piece, shard_bytes(shards, piece))
            while self._arrived:
                self._finish_one()
            yield mine

    def _send(self, transfer: _Transfer, shards: Mapping[str, Tensor]) -> None:
        data = [shard_bytes(shards, piece) for piece in transfer.pieces]
        packed = data[0] if len(data) == 1 else torch.cat(data, out=self._chunk(transfer.num_bytes))
        self._start(transfer, lambda: dist.isend(packed, transfer.bucket.sender), _nothing)

    def _receive(self, transfer: _Transfer, flat: Tensor, rows: Mapping[str, Tensor]) -> None:
        self.received_bytes += transfer.num_bytes
        if transfer.span is not None:
            first, last = transfer.span
            self._start(transfer, lambda: dist.irecv(flat[first:last], transfer.source), _nothing)
            return
        chunk = self._chunk(transfer.num_bytes)
        self._start(transfer, lambda: dist.irecv(chunk, transfer.source), partial(unpack, rows, transfer.pieces, chunk))

    def _start(self, transfer: _Transfer, start: Callable[[], dist.Work | None], then: Callable[[], None]) -> None:
        with self._peers.contact(self._until, lambda: transfer.doing(self._rank)):
            work = start()
        self._arrived.append((transfer, work, then))

    def _finish_one(self) -> None:
        transfer, work, then = self._arrived.popleft()
        with self._peers.contact(self._until, lambda: transfer.doing(self._rank)):
            self._peers.finish(work, self._until)
        then()

    def _chunk(self, num_bytes: int) -> Tensor:
        """Returns room for a chunk: that of the chunk `CHUNKS_IN_FLIGHT` chunks ago, which has arrived."""
        index = self._chunks_used % CHUNKS_IN_FLIGHT
        self._chunks_used += 1
        if self._ring[index].numel() < num_bytes:
            self._ring[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._ring[index][:num_bytes]


def _nothing() -> None:
    """Does nothing: bytes that were sent, or that arrived in place, need no further step."""


def _part_of(rank: int, buckets: list[Bucket], chunk_bytes: int) -> _Round:
    """Returns the part of `rank` in the round of these buckets."""
    mine, own_pieces = None, ()
    lines: list[list[_Transfer]] = []
    for bucket in buckets:
        line = []
        for message in bucket.messages:
            if message.source == bucket.sender:
                if rank == bucket.sender:
                    own_pieces = message.pieces
                continue
            line += [_transfer(bucket, message.source, chunk) for chunk in message.chunks(chunk_bytes)]
        mine = bucket if bucket.sender == rank else mine
        lines.append(line)
    turns = range(max(len(line) for line in lines))
    ordered = [line[turn] for turn in turns for line in lines if turn < len(line)]
    return _Round(mine, own_pieces, tuple(t for t in ordered if rank in (t.source, t.bucket.sender)))


def _transfer(bucket: Bucket, source: int, pieces: tuple[Piece, ...]) -> _Transfer:
    num_bytes = sum(piece.num_bytes for piece in pieces)
    return _Transfer(source, bucket, pieces, num_bytes, contiguous_span(bucket, pieces))
