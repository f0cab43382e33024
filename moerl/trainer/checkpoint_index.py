"""The index of a checkpoint's tensors (`.metadata` of torch.distributed.checkpoint), made from the shards of each rank.

torch makes the index from pickled plans that the ranks send one another. Here a rank plans and writes alone, and sends
the place of each of its shards as plain data to the first rank. Runs in every trainer rank, in any thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from moerl.errors import CheckpointError


class Box(msgspec.Struct, array_like=True, frozen=True):
    """Part of a tensor that a shard has."""

    offsets: tuple[int, ...]
    """First element of the part, per dimension."""
    sizes: tuple[int, ...]
    """Elements of the part, per dimension."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Name of the dtype in torch, as "bfloat16"."""


class Shard(msgspec.Struct, array_like=True, frozen=True):
    """Place in a file of a part of a tensor, or of an object."""

    name: str
    """Name of the tensor or object in the checkpoint."""
    box: Box | None
    """Part of the tensor; None for an object."""
    file: str
    """Path in the checkpoint's folder."""
    start: int
    """Offset in the file, in bytes."""
    length: int
    """Length in the file, in bytes."""


def write_shards(entries: Mapping[str, Any], folder: Path, rank: int) -> list[Shard]:
    """Writes and syncs this rank's files; returns the places of their shards.

    Args:
        entries: of `StagedState`.
    """
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = _writer(folder)
    planner.set_up_planner(dict(entries), writer.storage_meta(), rank == 0)
    # Each rank names its files by itself, after its number.
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = planner.finish_plan(writer.prepare_local_plan(planner.create_local_plan()))
    items = {item.index: item for item in plan.items}
    written = writer.write_data(plan, planner)
    written.wait()
    shards = []
    for result in written.value():
        box, tensor, place = None, items[result.index].tensor_data, result.storage_data
        if tensor is not None:
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            box = Box(tuple(tensor.chunk.offsets), tuple(tensor.chunk.sizes), tuple(tensor.size), dtype)
        shards.append(Shard(result.index.fqn, box, place.relative_path, place.offset, place.length))
    return shards


def write_index(shards: Sequence[Shard], folder: Path) -> None:
    """Writes and syncs the index of the shards of all ranks.

    Raises:
        CheckpointError: the shards are not every tensor, whole and once.
    """
    tensors: dict[str, Any] = {}
    for shard in shards:
        if shard.box is None:
            if shard.name in tensors:
                raise _not_whole(shard.name, "written twice")
            tensors[shard.name] = BytesStorageMetadata()
            continue
        whole = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, shard.box.dtype)), torch.Size(shard.box.shape), []
        )
        known = tensors.setdefault(shard.name, whole)
        if dataclasses.replace(known, chunks=[]) != whole:
            raise _not_whole(shard.name, f"of {shard.box.dtype} {shard.box.shape} on one rank and not on another")
        known.chunks.append(ChunkStorageMetadata(torch.Size(shard.box.offsets), torch.Size(shard.box.sizes)))
    metadata = Metadata(tensors)
    _check(metadata)
    results = []
    for shard in shards:
        index = MetadataIndex(shard.name, None if shard.box is None else shard.box.offsets)
        results.append(WriteResult(index, shard.length, _StorageInfo(shard.file, shard.start, shard.length)))
    _writer(folder).finish(metadata, [results])


def _writer(folder: Path) -> FileSystemWriter:
    # Copying ahead would open a CUDA stream in this thread; everything is in host memory already.
    return FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)


def _check(metadata: Metadata) -> None:
    """Raises `CheckpointError` unless its shards cover every tensor: none outside, none over another, nothing left
    out."""
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            spans = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            if not all(0 <= offset <= offset + size <= whole for offset, size, whole in spans):
                raise _not_whole(name, f"a shard out of bounds: {_place(chunk)}, of {tuple(tensor.size)}")
        if (over := _written_twice(tensor)) is not None:
            raise _not_whole(name, f"overlapping shards, one of them {_place(over)}, of {tuple(tensor.size)}")
        stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if stored != math.prod(tensor.size):
            raise _not_whole(name, f"{stored} of {math.prod(tensor.size)} elements")


def _written_twice(tensor: TensorStorageMetadata) -> ChunkStorageMetadata | None:
    """Returns the first shard with an element of an earlier one; None if there is none.

    Shards begin and end at few places, which cut the tensor into boxes: each is in one shard or in none.
    """
    cuts = []
    for dim in range(len(tensor.size)):
        bounds = {chunk.offsets[dim] + more for chunk in tensor.chunks for more in (0, chunk.sizes[dim])}
        cuts.append({bound: index for index, bound in enumerate(sorted(bounds))})
    is_written = np.zeros([max(0, len(each) - 1) for each in cuts], np.bool_)
    for chunk in tensor.chunks:
        spans = zip(cuts, chunk.offsets, chunk.sizes, strict=True)
        box = tuple(slice(cut[offset], cut[offset + size]) for cut, offset, size in spans)
        if is_written[box].any():
            return chunk
        is_written[box] = True
    return None


def _place(chunk: ChunkStorageMetadata) -> str:
    return f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}"


def _not_whole(name: str, seen: str) -> CheckpointError:
    return CheckpointError(
        f"the ranks did not write '{name}' as a whole",
        seen=seen,
        expected="every element of every tensor by one rank",
        remedy="this is a fault of the trainer; please report it with the configuration of the run",
    )
