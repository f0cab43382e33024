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


def scalar(name: str) -> Shard:
    return Shard(name, Box((), (), (), "float32"), "__0_0.distcp", 0, 4)


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
    "shards",
    [
        [
            shard("w", (0, 0), (1, 6)),
            shard("w", (1, 0), (3, 2)),
            shard("w", (1, 2), (2, 4)),
            shard("w", (3, 2), (1, 4)),
        ],
        [shard("w", (row, column), (2, 3)) for row in (0, 2) for column in (0, 3)],
        [*WHOLE[:2], shard("w", (0, 0), (0, 6))],
        [scalar("x")],
        [Shard("nothing", Box((0, 0), (0, 6), (0, 6), "float32"), "__0_0.distcp", 0, 0)],
    ],
)
def test_shards_that_cover_a_tensor_in_any_way_are_taken(shards: list[Shard], tmp_path: Path) -> None:
    write_index(shards, tmp_path)
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shards", "seen"),
    [
        (WHOLE[:1], "18 of 24 elements"),
        ([*WHOLE, WHOLE[2]], "written twice"),
        ([*WHOLE, WHOLE[1]], r"overlapping shards, one of them \(1, 6\) at \(3, 0\), of \(4, 6\)"),
        # As many elements as the tensor has.
        ([shard("w", (0, 0), (4, 3)), shard("w", (0, 2), (4, 3))], "overlapping shards"),
        ([shard("w", (0, 0), (2, 6)), shard("w", (1, 5), (2, 1)), shard("w", (3, 0), (1, 6))], "overlapping shards"),
        ([shard("w", (0, 0), (2, 3)), shard("w", (2, 3), (2, 3))], "12 of 24 elements"),
        ([shard("w", (0, 0), (5, 6))], r"a shard out of bounds: \(5, 6\) at \(0, 0\)"),
        ([shard("w", (-1, 0), (4, 6))], "out of bounds"),
        ([scalar("x"), scalar("x")], "overlapping shards"),
        ([WHOLE[0], shard("w", (3, 0), (1, 6), dtype="float32")], "on one rank and not on another"),
    ],
)
def test_shards_that_are_no_whole_tensors_are_refused(shards: list[Shard], seen: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=seen):
        write_index(shards, tmp_path)
    assert not list(tmp_path.iterdir())
