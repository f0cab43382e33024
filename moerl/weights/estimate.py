"""Bytes per link and time of a weight update, worked out from its plan. Torch-free.

Every sender has two links: one to the other trainer ranks, over which it gathers, and one to the engines. Gathering a
bucket overlaps sending the one before it, so a sender takes as long as the slower of both, and the first bucket's
gathering (or the last one's sending) on top:

    seconds = max over senders of  sum over buckets of max(gather of bucket k + 1, send of bucket k)

One sender sends a bucket once, however many servers there are: they pass its pieces on to one another, and the last one
has it later than the first by as many pieces as there are servers before it. Several senders send a bucket to every
server. A server takes one bucket at a time over a link of its own, so however many senders there are, an update takes
no less than all bytes over that link.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moerl.weights.plan import SyncPlan


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of one link of a sender: towards trainer ranks, and towards engines (as of an engine's own)."""

    gather: float
    engine: float


@dataclass(frozen=True, slots=True)
class SenderLoad:
    """Load of one sender. num_bytes: of its buckets. received_bytes: of its buckets, from other ranks."""

    rank: int
    num_buckets: int
    num_bytes: int
    received_bytes: int
    gather_seconds: float
    send_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Servers:
    """To which each bucket is sent. piece_bytes: of the pieces that they pass on to one another."""

    count: int
    piece_bytes: int

    def sent_bytes(self, num_bytes: int, num_senders: int) -> int:
        """For as long as which a sender's link is busy, or waits for the last server, with one bucket."""
        if num_senders > 1:
            return self.count * num_bytes
        return num_bytes + (self.count - 1) * min(self.piece_bytes, num_bytes)


ONE_ENGINE = Servers(1, 0)


def sender_loads(plan: SyncPlan, bandwidths: Bandwidths, servers: Servers = ONE_ENGINE) -> list[SenderLoad]:
    """The load of each sender, in rank order."""
    loads = []
    num_senders = len(plan.options.senders)
    for rank in plan.options.senders:
        buckets = [bucket for bucket in plan.buckets if bucket.sender == rank]
        gathers = [bucket.received_bytes / bandwidths.gather for bucket in buckets]
        sends = [servers.sent_bytes(bucket.num_bytes, num_senders) / bandwidths.engine for bucket in buckets]
        steps = zip([*gathers, 0.0], [0.0, *sends], strict=True)
        loads.append(
            SenderLoad(
                rank,
                len(buckets),
                sum(bucket.num_bytes for bucket in buckets),
                sum(bucket.received_bytes for bucket in buckets),
                sum(gathers),
                sum(sends),
                sum(max(step) for step in steps),
            )
        )
    return loads


def sent_bytes(plan: SyncPlan) -> Counter[int]:
    """Bytes that each rank sends to senders."""
    sent: Counter[int] = Counter()
    for bucket in plan.buckets:
        for message in bucket.messages:
            if message.source != bucket.sender:
                sent[message.source] += message.num_bytes
    return sent
