"""Bytes per link and time of a weight update, computed from its plan. Torch-free.

Every sender has two links: one to the other trainer ranks, over which it gathers, and one to the engines. Gathering a
bucket overlaps sending the one before it, so a sender takes as long as the slower of both, and the first bucket's
gathering (or the last one's sending) on top:

    seconds = max over senders of  sum over buckets of max(gather of bucket k + 1, send of bucket k)

One sender sends a bucket once, however many servers there are: they pass its pieces on to one another, and the last one
has the bucket later than the first by as many pieces as there are servers before it. Several senders send a bucket to
every server. A server receives one bucket at a time over a link of its own, so however many senders there are, an
update takes no less than all bytes over that link.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moerl.weights.plan import SyncPlan


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of the two links of a sender."""

    gather: float
    """Bytes per second from other trainer ranks."""
    engine: float
    """Bytes per second to engines; an engine's own link has the same."""


@dataclass(frozen=True, slots=True)
class SenderLoad:
    """Load of one sender in an update."""

    rank: int
    """Its trainer rank."""
    num_buckets: int
    """Buckets that it sends."""
    num_bytes: int
    """Bytes of its buckets."""
    received_bytes: int
    """Bytes of its buckets that come from other ranks."""
    gather_seconds: float
    """Sum over its buckets, without sending."""
    send_seconds: float
    """Sum over its buckets, without gathering."""
    seconds: float
    """Time of both, overlapped as the module says."""


def sender_loads(plan: SyncPlan, bandwidths: Bandwidths, num_servers: int, piece_bytes: int) -> list[SenderLoad]:
    """Returns the load of each sender, in rank order.

    Args:
        num_servers: servers to which each bucket is sent, at least 1.
        piece_bytes: bytes of the pieces that servers pass on to one another; unused for one server.
    """
    loads = []
    passes_on = len(plan.options.senders) == 1
    for rank in plan.options.senders:
        buckets = [bucket for bucket in plan.buckets if bucket.sender == rank]
        gathers = [bucket.received_bytes / bandwidths.gather for bucket in buckets]
        sends = []
        for bucket in buckets:
            # A sender sends, or waits for the last server.
            later_bytes = min(piece_bytes, bucket.num_bytes) if passes_on else bucket.num_bytes
            sends.append((bucket.num_bytes + (num_servers - 1) * later_bytes) / bandwidths.engine)
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
    """Returns the bytes that each rank sends to senders."""
    sent: Counter[int] = Counter()
    for bucket in plan.buckets:
        for message in bucket.messages:
            if message.source != bucket.sender:
                sent[message.source] += message.num_bytes
    return sent
