"""The schedule of a weight update: the tensors of each bucket, its sender, and the ranks that have its parts.
Torch-free.

A plan follows from the manifest of the published tensors (`moerl.weights.manifest`), so every rank computes the same
one. Tensors stand in one order: dense ones by pipeline stage and layer, experts by stage, owner and layer. The order is
cut into as many parts of equal bytes as there are senders, and each part into buckets of one stage and kind. A bucket's
tensors lie behind one another without gaps, as in safetensors and flattened buckets.

A sender receives the parts of its buckets that are not in its shards, each part from one rank that has it, in chunks of
whole pieces. A rank needs, beyond its shards, room for four chunks on their way and, if it is a sender, for two buckets
(one being filled, one being sent). With chunks of 1/32 and buckets filled to 30/32 that is at most two times
`bucket_bytes`. A tensor that is larger has a bucket of its own: engines load whole tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moerl.config.schema import WeightsConfig
from moerl.contract.parallel import ParallelDims
from moerl.errors import ConfigError
from moerl.weights.manifest import Owners, PublishedTensor, WeightManifest
from moerl.weights.tensors import FLOAT32_BYTES, MegatronTensor, Piece, shard_pieces

CHUNKS_PER_BUCKET = 32
CHUNKS_IN_FLIGHT = 4
"""Chunks of a rank on their way at a time, at most; sent and received ones together."""
Gather = Literal["sender", "allgather"]
Kind = Literal["dense", "expert"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Settings that, with model and layout, determine a plan."""

    senders: tuple[int, ...]
    """Ranks that hand buckets to engines, in rank order."""
    item_bytes: int
    """Bytes of one value of a parameter, 2 or 4."""
    bucket_bytes: int
    """Bytes by which buckets and chunks are sized, see the module."""
    gather: Gather = "sender"
    """sender = every part comes from the sender itself, or from the least loaded rank that has it; allgather = the
    ranks of the first replica gather from one another."""

    @classmethod
    def of(cls, weights: WeightsConfig, dims: ParallelDims, item_bytes: int) -> PlanOptions:
        """Returns the options that a section `weights` asks for, for a layout and the precision of the weights."""
        return cls(choose_senders(dims, weights.senders), item_bytes, weights.bucket_bytes, weights.gather)

    @property
    def chunk_bytes(self) -> int:
        return max(1, self.bucket_bytes // CHUNKS_PER_BUCKET)

    @property
    def payload_bytes(self) -> int:
        """Bytes in a bucket of more than one tensor, at most."""
        return max(1, self.bucket_bytes - CHUNKS_IN_FLIGHT // 2 * self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """One Hugging Face tensor in its bucket."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    element: str
    """Element type, as in `MegatronTensor`."""
    offset: int
    """Bytes from the start of the bucket."""
    num_bytes: int
    """Bytes of the tensor."""


@dataclass(frozen=True, slots=True)
class Message:
    """Contribution of one rank to a bucket."""

    source: int
    """Rank that has the pieces; may be the sender itself."""
    pieces: tuple[Piece, ...]
    """Pieces in the order of the bucket, none larger than a chunk unless it is one row."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def chunks(self, most_bytes: int) -> Iterator[tuple[Piece, ...]]:
        """Yields the pieces in groups that travel together, of at most `most_bytes` unless one row is more."""
        chunk: list[Piece] = []
        size = 0
        for piece in self.pieces:
            if chunk and size + piece.num_bytes > most_bytes:
                yield tuple(chunk)
                chunk, size = [], 0
            chunk.append(piece)
            size += piece.num_bytes
        if chunk:
            yield tuple(chunk)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that reach an engine together."""

    number: int
    """Number among the buckets of its sender, from 0."""
    sender: int
    """Rank that gathers it and hands it to engines."""
    stage: int
    """Pipeline stage that has its tensors."""
    kind: Kind
    """Kind of all its tensors."""
    entries: tuple[Entry, ...]
    """Its tensors, by offset."""
    messages: tuple[Message, ...]
    """Contributions, one per rank, in rank order."""

    @property
    def label(self) -> str:
        """Name for errors."""
        what = f"stage {self.stage}, {self.kind}, {len(self.entries)} tensors"
        return f"bucket {self.number} of rank {self.sender} ({what})"

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def received_bytes(self) -> int:
        """Bytes that the sender receives from other ranks."""
        return sum(message.num_bytes for message in self.messages if message.source != self.sender)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The whole schedule of an update."""

    manifest: WeightManifest
    """Published tensors."""
    options: PlanOptions
    """Options that the plan was made with."""
    buckets: tuple[Bucket, ...]
    """All buckets, those of each sender in the order of their numbers."""

    def rounds(self) -> list[list[Bucket]]:
        """Returns for each k the buckets that are gathered together: the k-th of every sender, in the order of
        senders."""
        count = max((bucket.number + 1 for bucket in self.buckets), default=0)
        rounds: list[list[Bucket]] = [[] for _ in range(count)]
        for bucket in self.buckets:
            rounds[bucket.number].append(bucket)
        return [sorted(each, key=lambda bucket: bucket.sender) for each in rounds]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all tensors that are sent, by checkpoint name: the list of an update by this plan."""
        return {entry.name: entry.shape for bucket in self.buckets for entry in bucket.entries}

    @property
    def largest_bucket_bytes(self) -> int:
        return max((bucket.num_bytes for bucket in self.buckets), default=0)


def choose_senders(dims: ParallelDims, count: int) -> tuple[int, ...]:
    """Returns `count` ranks spread evenly: over pipeline stages, and in a stage over the ranks that have different
    shards.

    Raises:
        ConfigError: there are not so many ranks.
    """
    if not 1 <= count <= dims.world_size:
        raise ConfigError(
            "weights.senders: not a number of trainer ranks",
            seen=count,
            expected=f"1 to {dims.world_size}",
            remedy="one sender for each link to the engines is enough",
        )
    per_stage = dims.world_size // dims.pipeline
    block = min(per_stage, max(dims.tensor, dims.expert * dims.expert_tensor))
    senders = []
    for stage in range(dims.pipeline):
        here = count * (stage + 1) // dims.pipeline - count * stage // dims.pipeline
        # With fewer senders than stages the first stages of equal spans have one.
        here = here if count >= dims.pipeline else int(any(i * dims.pipeline // count == stage for i in range(count)))
        width = block if here <= block else per_stage
        senders += [stage * per_stage + i * width // here for i in range(here)]
    return tuple(senders)


def make_plan(manifest: WeightManifest, options: PlanOptions) -> SyncPlan:
    """Returns the schedule for the tensors of a manifest. Deterministic: every rank makes the same."""
    targets: dict[str, _Target] = {}
    turns: Counter[tuple[int, str, Owners]] = Counter()
    for published in manifest.tensors:
        tensor, stage = published.tensor, published.owners[0][0] // manifest.dims.ranks_per_stage
        item_bytes = FLOAT32_BYTES if tensor.element == "float32" else options.item_bytes
        # Tensors of one layer and role that the same ranks have are counted.
        role = (tensor.layer, tensor.name.rsplit(".", 2)[1], published.owners)
        for number, block in enumerate(tensor.blocks):
            for run in block.runs:
                if run.name not in targets:
                    order = (stage, *_order(published, number, turns[role], options), len(targets))
                    targets[run.name] = _Target(run.name, tensor, stage, order, item_bytes)
                target = targets[run.name]
                target.num_rows = max(target.num_rows, run.start + run.count)
        turns[role] += 1
        for shard, holders in enumerate(published.owners):
            for piece in shard_pieces(tensor, shard, published.ways, item_bytes):
                targets[piece.target].sources.append((piece, holders))
    return SyncPlan(manifest, options, tuple(_buckets(targets.values(), options)))


# --- Hugging Face tensors --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Target:
    """A Hugging Face tensor while its pieces are collected. tensor: the first Megatron tensor that has rows of it.
    order: sorts the tensors of its kind. sources: its pieces, each with the ranks that have it."""

    name: str
    tensor: MegatronTensor
    stage: int
    order: tuple[int, ...]
    item_bytes: int
    num_rows: int = 0
    sources: list[tuple[Piece, Sequence[int]]] = field(default_factory=list[tuple[Piece, Sequence[int]]])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.tensor.num_columns * self.item_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows,) if self.tensor.is_vector else (self.num_rows, self.tensor.num_columns)


def _order(published: PublishedTensor, block: int, turn: int, options: PlanOptions) -> tuple[int, ...]:
    """Returns the key that sorts the blocks of a stage: experts by owner, so that the experts of a sender stay together
    and arrive in one piece; for all-gathering in turns of their owners, so that all owners contribute alike to a
    bucket.

    Args:
        turn: number of the tensor among those of its layer and role that the same ranks have.
    """
    tensor = published.tensor
    if tensor.expert is None:
        return ()
    if options.gather == "allgather":
        return tensor.layer, turn, len(tensor.blocks), block
    return (published.owners[0][0],)


# --- buckets ---------------------------------------------------------------------------------------------------------


def _buckets(targets: Iterable[_Target], options: PlanOptions) -> Iterator[Bucket]:
    by_kind: dict[Kind, list[_Target]] = {"dense": [], "expert": []}
    for target in targets:
        by_kind["dense" if target.tensor.expert is None else "expert"].append(target)
    numbers: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for kind, members in by_kind.items():
        members.sort(key=lambda target: target.order)
        for sender, stage, group in _groups(members, options):
            yield _bucket(numbers[sender], sender, (kind, stage), group, options, sent)
            numbers[sender] += 1


def _groups(members: Sequence[_Target], options: PlanOptions) -> Iterator[tuple[int, int, list[_Target]]]:
    """Yields (sender, stage, tensors) of each bucket: consecutive tensors of one sender and one stage, up to the
    payload."""
    total = sum(target.num_bytes for target in members)
    before, size = 0, 0
    group: list[_Target] = []
    place = (-1, -1)
    for target in members:
        # By its middle, so that the parts differ by a tensor at most.
        part = (2 * before + target.num_bytes) * len(options.senders) // (2 * total)
        here = (options.senders[part], target.stage)
        if group and (here != place or size + target.num_bytes > options.payload_bytes):
            yield place[0], place[1], group
            group, size = [], 0
        place = here
        group.append(target)
        size += target.num_bytes
        before += target.num_bytes
    if group:
        yield place[0], place[1], group


def _bucket(
    number: int,
    sender: int,
    place: tuple[Kind, int],
    group: Sequence[_Target],
    options: PlanOptions,
    sent: Counter[int],
) -> Bucket:
    """Returns one bucket. sent: bytes that each rank sends in the plan so far; this bucket's are added."""
    # Wide elements first: without gaps every tensor still starts at a multiple of its element.
    group = sorted(group, key=lambda target: -target.item_bytes)
    entries, offset = [], 0
    pieces: dict[int, list[Piece]] = {}
    chosen: dict[Sequence[int], int] = {}
    for target in group:
        entries.append(Entry(target.name, target.shape, target.tensor.element, offset, target.num_bytes))
        offset += target.num_bytes
        for piece, holders in sorted(target.sources, key=lambda s: (s[0].target_row, s[0].target_column)):
            if holders not in chosen:
                chosen[holders] = _source(holders, sender, options, sent)
            source = chosen[holders]
            pieces.setdefault(source, []).extend(piece.cut(options.chunk_bytes))
            if source != sender:
                sent[source] += piece.num_bytes
    messages = tuple(Message(source, tuple(pieces[source])) for source in sorted(pieces))
    return Bucket(number, sender, place[1], place[0], tuple(entries), messages)


def _source(holders: Sequence[int], sender: int, options: PlanOptions, sent: Counter[int]) -> int:
    if options.gather == "allgather":
        return holders[0]
    if sender in holders:
        return sender
    return min(holders, key=lambda rank: (sent[rank], rank))
