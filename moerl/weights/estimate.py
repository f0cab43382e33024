"""Bytes per link and time of a weight update, worked out from its plan. Torch-free.

Every root has two links: one to the other trainer ranks, over which it gathers, and one to the engines. Gathering a
bucket overlaps sending the one before it, so a root takes as long as the slower of both, and the first bucket's
gathering (or the last one's sending) on top:

    seconds = max over roots of  sum over buckets of max(gather of bucket k + 1, send of bucket k)

One root sends a bucket once, however many servers there are: they pass its pieces on to one another, and the last one
has it later than the first by as many pieces as there are servers before it. Several roots send a bucket to every
server. A server takes one bucket at a time over a link of its own, so however many roots there are, an update takes no
less than all bytes over that link.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moerl.weights.plan import SyncPlan


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of one link of a root: towards trainer ranks, and towards engines (as of an engine's own)."""

    gather: float
    engine: float


@dataclass(frozen=True, slots=True)
class RootLoad:
    """What one root does. num_bytes: of its buckets. received_bytes: what of them it does not hold."""

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

    def sent_bytes(self, num_bytes: int, num_roots: int) -> int:
        """For as long as which a root's link is busy, or waits for the last server, with one bucket."""
        if num_roots > 1:
            return self.count * num_bytes
        return num_bytes + (self.count - 1) * min(self.piece_bytes, num_bytes)


ONE_ENGINE = Servers(1, 0)


def root_loads(plan: SyncPlan, bandwidths: Bandwidths, servers: Servers = ONE_ENGINE) -> list[RootLoad]:
    """The load of each root, in rank order."""
    loads = []
    num_roots = len(plan.options.roots)
    for rank in plan.options.roots:
        buckets = [bucket for bucket in plan.buckets if bucket.root == rank]
        gathers = [bucket.received_bytes / bandwidths.gather for bucket in buckets]
        sends = [servers.sent_bytes(bucket.num_bytes, num_roots) / bandwidths.engine for bucket in buckets]
        steps = zip([*gathers, 0.0], [0.0, *sends], strict=True)
        loads.append(
            RootLoad(
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
    """Bytes that each rank sends to roots."""
    sent: Counter[int] = Counter()
    for bucket in plan.buckets:
        for message in bucket.messages:
            if message.sender != bucket.root:
                sent[message.sender] += message.num_bytes
    return sent
