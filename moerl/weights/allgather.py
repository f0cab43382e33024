"""Gathering buckets the field's simple way, as a reference: every holder of a part receives the whole bucket.

Runs in every trainer rank. The ranks of a stage that hold its first replica all-gather each bucket, padded to the
largest contribution; the first of them sends it to the sender if the sender is none of them. A bucket that the sender
has whole is not exchanged at all. Memory and traffic grow with the number of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.weights.bucket import DTYPES, WeightBucket, shard_bytes, unpack
from moerl.weights.gather import TakeSlot
from moerl.weights.peers import Peers
from moerl.weights.plan import Bucket, SyncPlan


class AllGather:
    """Gatherer by all-gathers, for a plan that was made with `PlanOptions.gather` allgather. Attributes as in
    `SenderGather`."""

    def __init__(self, plan: SyncPlan, peers: Peers) -> None:
        """Makes a process group for each pipeline stage. A collective of all ranks."""
        self._peers, self._rank, self._device = peers, peers.rank, peers.device
        self._until = 0.0
        self._dtype = DTYPES[plan.options.item_bytes]
        self._rounds = plan.rounds()
        dims = plan.manifest.dims
        count = max(dims.tensor, dims.expert * dims.expert_tensor)
        starts = [stage * dims.ranks_per_stage for stage in range(dims.pipeline)]
        self._members = [list(range(start, start + count)) for start in starts]
        self._groups = [dist.new_group(members) if count > 1 else None for members in self._members]
        self.received_bytes = 0
        self._room: dict[int, Tensor] = {}

    def gather(self, shards: Mapping[str, Tensor], take_slot: TakeSlot) -> Iterator[WeightBucket | None]:
        """Does the same as `SenderGather.gather`."""
        self.received_bytes = 0
        for buckets in self._rounds:
            mine, self._until = None, self._peers.until()
            for bucket in buckets:
                members = self._members[bucket.stage]
                flat = None
                if bucket.sender == self._rank:
                    flat = take_slot(bucket.num_bytes)
                    mine = WeightBucket(bucket, flat, self._dtype)
                elif self._rank in members:
                    flat = self._buffer(-1, bucket.num_bytes)
                if flat is None:
                    continue
                if self._rank in members:
                    self._assemble(bucket, flat, shards)
                if bucket.sender not in members:
                    self._hand_on(bucket, flat, members[0])
            yield mine

    def _assemble(self, bucket: Bucket, flat: Tensor, shards: Mapping[str, Tensor]) -> None:
        members = self._members[bucket.stage]
        messages = {message.source: message for message in bucket.messages}
        is_whole = messages.keys() == {bucket.sender}
        if is_whole and self._rank != bucket.sender:
            return
        longest = max(message.num_bytes for message in bucket.messages)
        own = self._buffer(len(members), longest)
        if self._rank in messages:
            mine = messages[self._rank]
            torch.cat([shard_bytes(shards, piece) for piece in mine.pieces], out=own[: mine.num_bytes])
        group = self._groups[bucket.stage]
        parts = [own for _ in members]
        if group is not None and not is_whole:
            parts = [self._buffer(number, longest) for number in range(len(members))]
            doing = f"{bucket.label}: rank {self._rank} all-gathers with ranks {members}"
            self._peers.meet(
                lambda: dist.all_gather(parts, own, group=group, async_op=True), self._until, doing, members
            )
            self.received_bytes += longest * (len(members) - 1)
        rows = WeightBucket(bucket, flat, self._dtype).rows()
        for member, part in zip(members, parts, strict=True):
            if member in messages:
                unpack(rows, messages[member].pieces, part[: messages[member].num_bytes])

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        """Returns the buffer `number`, of at least `num_bytes`; every bucket uses it again."""
        room = self._room.get(number)
        if room is None or room.numel() < num_bytes:
            room = self._room[number] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return room[:num_bytes]

    def _hand_on(self, bucket: Bucket, flat: Tensor, first: int) -> None:
        if self._rank == first:
            self._travel(bucket, f"sends to rank {bucket.sender}", lambda: dist.isend(flat, bucket.sender))
        elif self._rank == bucket.sender:
            self._travel(bucket, f"receives from rank {first}", lambda: dist.irecv(flat, first))
            self.received_bytes += bucket.num_bytes

    def _travel(self, bucket: Bucket, doing: str, start: Callable[[], dist.Work | None]) -> None:
        with self._peers.contact(self._until, lambda: f"{bucket.label}: rank {self._rank} {doing}"):
            self._peers.finish(start(), self._until)
