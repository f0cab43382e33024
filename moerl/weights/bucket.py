"""Buckets in memory: a flat tensor of bytes, and the weights that lie in it. Runs in every trainer rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.weights.plan import Bucket, SyncPlan
from moerl.weights.tensors import Piece

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Dtypes of parameters, by the bytes of one value."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """A bucket that a sender has gathered. Iterates over (Hugging Face name, tensor)."""

    bucket: Bucket
    """Its entry in the plan."""
    flat: Tensor
    """uint8 [num_bytes]; the tensors, which are views of it, behind one another without gaps. It is written over once
    the sink's `receive` has returned: a sink that keeps a tensor copies it."""
    dtype: torch.dtype
    """dtype of parameters; entries whose element is float32 have that."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self.bucket.entries:
            dtype = torch.float32 if entry.element == "float32" else self.dtype
            data = self.flat[entry.offset : entry.offset + entry.num_bytes]
            yield entry.name, data.view(dtype).view(entry.shape)

    def parts(self) -> list[Tensor]:
        """Returns all elements as one vector for each dtype."""
        wide = sum(entry.num_bytes for entry in self.bucket.entries if entry.element == "float32")
        parts = [self.flat[:wide].view(torch.float32), self.flat[wide:].view(self.dtype)]
        return [part for part in parts if part.numel()]

    def rows(self) -> dict[str, Tensor]:
        """Returns views of the tensors as uint8 [rows, bytes of a row], by name."""
        return {
            entry.name: self.flat[entry.offset : entry.offset + entry.num_bytes].view(entry.shape[0], -1)
            for entry in self.bucket.entries
        }


def shard_bytes(shards: Mapping[str, Tensor], piece: Piece) -> Tensor:
    """Returns a piece's bytes in the shard it comes from: uint8 [num_bytes], a view if the shard is contiguous."""
    rows = shards[piece.source][piece.source_row : piece.source_row + piece.num_rows]
    return rows.reshape(-1).view(torch.uint8)


def place(rows: Mapping[str, Tensor], piece: Piece, data: Tensor) -> None:
    """Copies a piece's bytes to their place in a bucket.

    Args:
        rows: of the bucket, see `WeightBucket.rows`.
        data: uint8 [num_bytes].
    """
    width = piece.num_bytes // piece.num_rows
    first = piece.target_column * (width // piece.num_columns)
    target = rows[piece.target][piece.target_row : piece.target_row + piece.num_rows, first : first + width]
    target.copy_(data.view(piece.num_rows, width))


def unpack(rows: Mapping[str, Tensor], pieces: Sequence[Piece], data: Tensor) -> None:
    """Copies the bytes of pieces, which lie behind one another in `data`, to their places. Arguments as in `place`."""
    for piece, part in zip(pieces, data.split([piece.num_bytes for piece in pieces]), strict=True):
        place(rows, piece, part)


def contiguous_span(bucket: Bucket, pieces: tuple[Piece, ...]) -> tuple[int, int] | None:
    """Returns the first and last byte (exclusive) of pieces that lie behind one another in a bucket; None if they do
    not."""
    entries = {entry.name: entry for entry in bucket.entries}
    start = end = -1
    for piece in pieces:
        entry = entries[piece.target]
        row_bytes = entry.num_bytes // entry.shape[0]
        if piece.num_bytes != piece.num_rows * row_bytes:
            return None
        first = entry.offset + piece.target_row * row_bytes
        if end not in (-1, first):
            return None
        start = first if end == -1 else start
        end = first + piece.num_bytes
    return start, end


def find_shard_problem(plan: SyncPlan, rank: int, shards: Mapping[str, Tensor]) -> WeightSyncError | None:
    """Returns the error of a rank whose tensors are not those of the plan: one is missing, unknown, or of another shape
    or dtype. None if they are."""
    expected = plan.manifest.shard_shapes(rank)
    problems = [f"missing {name}" for name in expected.keys() - shards.keys()]
    problems += [f"unknown {name}" for name in shards.keys() - expected.keys()]
    dtype = DTYPES[plan.options.item_bytes]
    for name in expected.keys() & shards.keys():
        found = (tuple(shards[name].shape), shards[name].dtype)
        wanted = (expected[name], torch.float32 if name.endswith(".expert_bias") else dtype)
        if found != wanted:
            problems.append(f"{name}: {found[0]} of {found[1]}, not {wanted[0]} of {wanted[1]}")
    if not problems:
        return None
    return WeightSyncError(
        f"rank {rank} does not hold what the plan of the weight update says: {len(problems)} problems",
        seen="; ".join(sorted(problems)[:5]),
        expected=f"{len(expected)} tensors as cut by the parallel layout",
        remedy="report it with the model and layout; nothing was sent",
    )
