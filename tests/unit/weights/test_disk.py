"""Versions on disk: whole or not there, read back bit for bit, and refused when a byte has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from disks import power_may_go
from full_updates import full
from safetensors import safe_open
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.weights.bucket import WeightBucket
from moerl.weights.disk import HASHES, INDEX, DiskSink, read_buckets, version_name, versions
from moerl.weights.plan import Bucket, Entry


def bucket_of(tensors: dict[str, Tensor], *, sender: int = 0) -> WeightBucket:
    """A bucket that holds these; float32 first."""
    entries, offset = [], 0
    for name, tensor in tensors.items():
        element = "float32" if tensor.dtype == torch.float32 else "parameter"
        entries.append(Entry(name, tuple(tensor.shape), element, offset, tensor.nbytes))
        offset += tensor.nbytes
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    return WeightBucket(Bucket(0, sender, 0, "dense", tuple(entries), ()), flat, torch.bfloat16)


FIRST = {"bias": torch.randn(3), "a": torch.randn(3, 5).bfloat16()}
SECOND = {"b": torch.randn(7).bfloat16()}


def write(folder: Path, version: int = 4) -> Path:
    sink = DiskSink(folder, rank=0, senders=(0,))
    sink.begin_update(full(version, FIRST | SECOND))
    sink.receive(bucket_of(FIRST))
    sink.receive(bucket_of(SECOND))
    assert versions(folder) == [] or version not in versions(folder)
    sink.end_update()
    return folder / version_name(version)


def read(folder: Path, version: int, tensors: Mapping[str, Tensor] = FIRST | SECOND) -> dict[str, Tensor]:
    return {name: tensor for bucket in read_buckets(folder, full(version, tensors)) for name, tensor in bucket}


def test_a_version_is_read_back_bit_for_bit(tmp_path: Path):
    write(tmp_path)
    found = read(tmp_path, 4)
    assert found.keys() == FIRST.keys() | SECOND.keys()
    for name, tensor in (FIRST | SECOND).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_version_has_its_name_only_once_all_of_it_is_on_the_disk(tmp_path: Path):
    with power_may_go() as disk:
        write(tmp_path)
    assert [path.name for path in disk.renamed] == ["files-r000.json", "version-00000004"]
    assert disk.lost() == []


def test_the_index_leads_to_every_tensor(tmp_path: Path):
    folder = write(tmp_path)
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"].keys() == FIRST.keys() | SECOND.keys()
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as handle:
            assert name in handle.keys()  # noqa: SIM118 - the handle is no mapping


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["model-r000-00001.safetensors", INDEX, HASHES])
def test_a_version_that_was_harmed_is_refused_before_anything_is_read(
    harm: Callable[[Path], None], name: str, tmp_path: Path
):
    folder = write(tmp_path)
    harm(folder / name)
    found = []
    with pytest.raises(WeightSyncError, match=name if harm is not flip or name != HASHES else r"weights on disk"):
        found.extend(read(tmp_path, 4))
    assert found == []


def test_a_renamed_version_is_refused(tmp_path: Path):
    write(tmp_path).rename(tmp_path / version_name(5))
    with pytest.raises(WeightSyncError, match="version 4"):
        read(tmp_path, 5)


def test_an_update_that_was_never_ended_leaves_no_version(tmp_path: Path):
    sink = DiskSink(tmp_path, rank=0, senders=(0,))
    sink.begin_update(full(4, FIRST | SECOND))
    sink.receive(bucket_of(SECOND))
    assert versions(tmp_path) == []
    with pytest.raises(WeightSyncError, match=HASHES):
        read(tmp_path, 4)
    again = write(tmp_path)
    assert sorted(path.name for path in again.iterdir()) == [
        HASHES,
        "model-r000-00000.safetensors",
        "model-r000-00001.safetensors",
        INDEX,
    ]


def test_senders_write_side_by_side_and_the_first_makes_the_version(tmp_path: Path):
    sinks = [DiskSink(tmp_path, rank=rank, senders=(0, 2)) for rank in (0, 2)]
    # Left by an update of other senders that never ended.
    stray = DiskSink(tmp_path, rank=5, senders=(5,))
    stray.begin_update(full(1, FIRST | SECOND))
    stray.receive(bucket_of(FIRST))
    for sink, tensors in zip(sinks, (FIRST, SECOND), strict=True):
        sink.begin_update(full(1, FIRST | SECOND))
        sink.receive(bucket_of(tensors))
    sinks[1].end_update()
    assert versions(tmp_path) == []
    sinks[0].end_update()
    assert read(tmp_path, 1).keys() == FIRST.keys() | SECOND.keys()
    assert not list((tmp_path / version_name(1)).glob("*r005*"))


def test_one_tensor_from_two_senders_is_refused(tmp_path: Path):
    sinks = [DiskSink(tmp_path, rank=rank, senders=(0, 2)) for rank in (0, 2)]
    for sink in sinks:
        sink.begin_update(full(1, FIRST | SECOND))
        sink.receive(bucket_of(SECOND))
    sinks[0].receive(bucket_of(FIRST))
    sinks[1].end_update()
    with pytest.raises(WeightSyncError, match="came twice; seen: 1: 'b'"):
        sinks[0].end_update()
    assert versions(tmp_path) == []


def test_a_version_without_a_tensor_of_its_update_is_refused(tmp_path: Path):
    sink = DiskSink(tmp_path, rank=0, senders=(0,))
    sink.begin_update(full(1, FIRST | SECOND))
    sink.receive(bucket_of(SECOND))
    with pytest.raises(WeightSyncError, match="are missing; seen: 2: 'a'; 'bias'"):
        sink.end_update()
    assert versions(tmp_path) == []


@pytest.mark.parametrize("tensors", [FIRST, {"b": torch.ones(3)}, SECOND], ids=["unknown", "misshaped", "twice"])
def test_a_bucket_with_a_tensor_that_does_not_belong_is_refused_and_so_is_the_version(
    tensors: dict[str, Tensor], tmp_path: Path
):
    sink = DiskSink(tmp_path, rank=0, senders=(0,))
    sink.begin_update(full(1, SECOND))
    sink.receive(bucket_of(SECOND))
    for call in (lambda: sink.receive(bucket_of(tensors)), sink.end_update):
        with pytest.raises(WeightSyncError, match="version 1: tensor"):
            call()
    assert versions(tmp_path) == []


@pytest.mark.parametrize(
    "tensors",
    [FIRST, FIRST | SECOND | {"c": torch.ones(1)}, FIRST | {"b": torch.ones(3)}],
    ids=["more", "less", "other"],
)
def test_a_reader_refuses_a_version_that_is_not_the_update_it_expects(tensors: dict[str, Tensor], tmp_path: Path):
    write(tmp_path)
    with pytest.raises(WeightSyncError, match="update to version 4: tensor"):
        next(read_buckets(tmp_path, full(4, tensors)))


def test_the_newest_two_versions_stay_and_one_can_be_written_again(tmp_path: Path):
    for version in (1, 2, 3):
        write(tmp_path, version)
    assert versions(tmp_path) == [2, 3]
    sink = DiskSink(tmp_path, rank=0, senders=(0,))
    sink.begin_update(full(3, FIRST))
    sink.receive(bucket_of(FIRST))
    sink.end_update()
    assert read(tmp_path, 3, FIRST).keys() == FIRST.keys()


def test_a_run_that_went_back_keeps_what_it_writes_and_drops_the_versions_of_the_steps_it_makes_again(tmp_path: Path):
    for version in (9, 10, 11):
        write(tmp_path, version)
    write(tmp_path, 6)
    assert versions(tmp_path) == [6]
    assert read(tmp_path, 6)


def test_a_folder_of_another_name_is_no_version_and_stays(tmp_path: Path):
    for name in ("version-best", "version-00000001-copy", "version-7", "version-00000001.old"):
        (tmp_path / name).mkdir()
    for version in (1, 2, 3):
        write(tmp_path, version)
    assert versions(tmp_path) == [2, 3]
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"version": 4, "files": {"a": 1}}', '{"version": 4, "files": {"../a": {"bytes": 1}}}']
)
def test_a_list_of_hashes_that_is_none_is_refused(content: str, tmp_path: Path):
    (write(tmp_path) / HASHES).write_text(content)
    with pytest.raises(WeightSyncError, match=HASHES):
        read(tmp_path, 4)
