"""The index is made of what ranks say they wrote, and refused where that is not every tensor, whole and once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from moerl.errors import CheckpointError
from moerl.trainer.checkpoint_index import Box, Shard, write_index


def shard(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], *, dtype: str = "bfloat16") -> Shard:
    return Shard(name, Box(offsets, sizes, (4, 6), dtype), f"__{offsets[0]}_0.distcp", 100, 24)


WHOLE = [shard("w", (0, 0), (3, 6)), shard("w", (3, 0), (1, 6)), Shard("common", None, "__0_0.distcp", 0, 100)]


def test_the_index_says_where_each_shard_lies(tmp_path: Path) -> None:
    write_index(WHOLE, tmp_path)
    read = FileSystemReader(tmp_path).read_metadata()
    tensor: Any = read.state_dict_metadata["w"]
    assert (tensor.size, tensor.properties.dtype) == ((4, 6), torch.bfloat16)
    places = {(index.fqn, index.offset): place for index, place in read.storage_data.items()}
    assert {key: place.relative_path for key, place in places.items()} == {
        ("w", (0, 0)): "__0_0.distcp",
        ("w", (3, 0)): "__3_0.distcp",
        ("common", None): "__0_0.distcp",
    }
    assert {(place.offset, place.length) for place in places.values()} == {(100, 24), (0, 100)}


@pytest.mark.parametrize(
    ("shards", "seen"),
    [
        (WHOLE[:1], "18 of 24 elements"),
        ([*WHOLE, WHOLE[2]], "written twice"),
        ([*WHOLE, WHOLE[1]], "overlapping chunks"),
        ([shard("w", (0, 0), (5, 6))], "out of bounds"),
        ([WHOLE[0], shard("w", (3, 0), (1, 6), dtype="float32")], "on one rank and not on another"),
    ],
)
def test_shards_that_are_no_whole_tensors_are_refused(shards: list[Shard], seen: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=seen):
        write_index(shards, tmp_path)
    assert not list(tmp_path.iterdir())
