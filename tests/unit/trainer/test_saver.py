"""Saving beside training: what is written is the moment of saving, and a failure leaves the checkpoint before."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import tiny_moe
from faults import finish_checkpoints
from ranks import Ranks
from waiting import run_within

from moerl.errors import CheckpointError, ending
from moerl.trainer.checkpoint import checkpoint_names

LENGTHS = (9, 14)
NAMES = [f"1-rl-{step:06d}" for step in range(4)]


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


def step(trainer: Any, seed: int) -> None:
    local, denominator = tiny_moe.shares(trainer, tiny_moe.make_samples(seed, LENGTHS))
    trainer.step(local, tiny_moe.policy_loss(trainer, local, denominator), enforce=True)


def open_saver(folder: Path) -> Any:
    from moerl.trainer.checkpoint import CheckpointStore
    from moerl.trainer.saver import Saver

    store = CheckpointStore(folder, keep=2)
    return store, Saver(store)


def save(saver: Any, number: int, staged: Any) -> None:
    saver.save(NAMES[number], staged, tiny_moe.checkpoint_state(NAMES[number]))


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self) -> None:
        from moerl.trainer import sharded_state

        self.open = threading.Event()
        self._write = sharded_state.write
        sharded_state.write = self._wait_and_write  # type: ignore[assignment]

    def _wait_and_write(self, *args: Any) -> Any:
        assert self.open.wait(60)
        return self._write(*args)

    def close(self) -> None:
        from moerl.trainer import sharded_state

        self.open.set()
        sharded_state.write = self._write


# --- beside training -------------------------------------------------------------------------------------------------


def train_while_it_is_written(layout: Any, path: Path, folder: Path) -> None:
    trainer, gate = tiny_moe.build(layout, path), Gate()
    store, saver = open_saver(folder)
    try:
        with ending(saver.wait):
            step(trainer, 1)
            saved = tiny_moe.exported(trainer)
            save(saver, 1, trainer.stage())
            step(trainer, 2)
            saver.poll()
            assert store.latest() is None
            gate.open.set()
    finally:
        gate.close()
    found = store.latest()
    assert found.state == tiny_moe.checkpoint_state(NAMES[1])
    trainer.restore(found.path)
    assert tiny_moe.largest_difference(tiny_moe.exported(trainer), saved) == 0.0


def test_training_goes_on_and_what_is_written_is_the_moment_of_saving(
    untied: Path, tmp_path: Path, one_process: Ranks
) -> None:
    one_process.run(train_while_it_is_written, untied, tmp_path)


def save_twice(layout: Any, path: Path, folder: Path) -> None:
    trainer, gate = tiny_moe.build(layout, path), Gate()
    store, saver = open_saver(folder)
    try:
        with ending(saver.wait):
            save(saver, 1, trainer.stage())
            threading.Timer(0.2, gate.open.set).start()
            save(saver, 2, trainer.stage())
            assert NAMES[1] in checkpoint_names(store.folder)
    finally:
        gate.close()
    assert checkpoint_names(store.folder) == [NAMES[1], NAMES[2]]


def test_a_second_checkpoint_waits_for_the_first(untied: Path, tmp_path: Path, one_process: Ranks) -> None:
    one_process.run(save_twice, untied, tmp_path)


# --- failures --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Injects a fault: the disk takes some tensors and then no more."""
    from torch.distributed.checkpoint import filesystem

    original, left = filesystem._write_item, 5

    def write_item(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    with mock.patch("torch.distributed.checkpoint.filesystem._write_item", write_item):
        yield


def save_where_one_rank_fails(layout: Any, path: Path, folder: Path, failing_rank: int) -> str:
    trainer = tiny_moe.build(layout, path)
    store, saver = open_saver(folder)
    save(saver, 1, trainer.stage())
    saver.wait()
    fault = contextlib.nullcontext()
    if layout.rank == failing_rank:
        fault = full_disk()
    with fault:
        save(saver, 2, trainer.stage())
        finish_checkpoints()
    with pytest.raises(CheckpointError) as caught:
        saver.poll()
    if layout.rank == 0:
        assert store.latest().state == tiny_moe.checkpoint_state(NAMES[1])
        assert [each.name for each in folder.iterdir()] == [NAMES[1]]
    with ending(saver.wait):
        save(saver, 3, trainer.stage())
    if layout.rank == 0:
        assert store.latest().state == tiny_moe.checkpoint_state(NAMES[3])
    return str(caught.value)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_cannot_write_stops_all_with_its_reason_and_leaves_the_checkpoint_before(
    failing_rank: int, untied: Path, tmp_path: Path, two_processes: Ranks
) -> None:
    messages = two_processes.run(save_where_one_rank_fails, untied, tmp_path, failing_rank, tensor=2)
    for message in messages:
        assert f"the checkpoint {NAMES[2]} was not written" in message
        assert f"rank {failing_rank}: OSError: [Errno 28] No space left on device" in message
        assert "free space" in message


def save_where_nothing_is_free(layout: Any, path: Path, folder: Path) -> str:
    trainer = tiny_moe.build(layout, path)
    _, saver = open_saver(folder)
    save(saver, 1, trainer.stage())
    saver.wait()
    staged = trainer.stage()
    with (
        mock.patch("moerl.trainer.saver.shutil.disk_usage", return_value=DiskUsage(9, 0, 1000)),
        pytest.raises(CheckpointError) as caught,
    ):
        save(saver, 2, staged)
    if layout.rank == 0:
        assert [each.name for each in folder.iterdir()] == [NAMES[1]]
    written = sum(file.stat().st_size for file in (folder / NAMES[1]).iterdir() if file.name != "manifest.json")
    if layout.dims.world_size == 1:
        assert written <= staged.num_bytes < 2 * written
    saver.wait()
    return str(caught.value)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_disk_without_room_is_refused_before_anything_is_written(
    tensor: int, untied: Path, tmp_path: Path, one_process: Ranks, two_processes: Ranks
) -> None:
    ranks = one_process if tensor == 1 else two_processes
    for message in ranks.run(save_where_nothing_is_free, untied, tmp_path, tensor=tensor):
        assert f"the disk is too full for the checkpoint {NAMES[2]}; the one before it is whole" in message
        assert "seen: 1000 bytes free" in message
        assert "lower checkpoint.keep" in message


def fail_while_a_write_fails(layout: Any, path: Path, folder: Path) -> list[str]:
    trainer = tiny_moe.build(layout, path)
    _, saver = open_saver(folder)

    def fail() -> None:
        with full_disk(), ending(saver.wait):
            save(saver, 1, trainer.stage())
            raise ValueError("training failed")

    with pytest.raises(ValueError, match="training failed") as caught:
        fail()
    return caught.value.__notes__


def test_an_error_of_training_is_not_hidden_by_one_of_saving(untied: Path, tmp_path: Path, one_process: Ranks) -> None:
    ((note,),) = one_process.run(fail_while_a_write_fails, untied, tmp_path)
    assert f"the checkpoint {NAMES[1]} was not written" in note


# --- a file system that is really full -------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
import shutil, sys
from collections import namedtuple
from pathlib import Path
sys.path.insert(0, {tests!r})
import tiny_moe
from moerl.contract.parallel import ParallelDims
from moerl.errors import CheckpointError
from moerl.trainer import groups
from moerl.trainer.checkpoint import CheckpointStore
from moerl.trainer.saver import Saver

layout = groups.start(rank=0, rendezvous="", dims=ParallelDims(), seed=1)
trainer = tiny_moe.build(layout, Path({model!r}))
store = CheckpointStore(Path({disk!r}) / "checkpoints", keep=2)
saver = Saver(store)
refusals = []
disk_usage = shutil.disk_usage

def wrong_once(path):
    shutil.disk_usage = disk_usage
    return namedtuple("DiskUsage", "free")(1 << 40)

for name in {names!r}:
    if name == {names[2]!r}:
        shutil.disk_usage = wrong_once
    try:
        saver.save(name, trainer.stage(), tiny_moe.checkpoint_state(name))
        saver.wait()
    except CheckpointError as error:
        refusals.append(str(error))
assert [path.name for path in store.folder.iterdir()] == [{names[0]!r}]
assert store.latest().state == tiny_moe.checkpoint_state({names[0]!r})
print("\\n".join(refusals))
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs a file system of its own: Linux with user namespaces")
@pytest.mark.slow
def test_on_a_full_disk_the_checkpoint_before_stays_whole(untied: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    code = ON_A_SMALL_DISK.format(
        tests=str(Path(__file__).parents[2]), model=str(untied), disk=str(disk), names=NAMES[1:4]
    )
    script = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -W ignore -c "$3"'
    finished = run_within(["unshare", "-rm", "sh", "-c", script, "sh", str(disk), sys.executable, code], 200)
    assert finished.returncode == 0, finished.stderr
    refused, failed = finished.stdout.splitlines()
    assert refused.startswith(f"the disk is too full for the checkpoint {NAMES[2]}; ")
    assert failed.startswith(f"the checkpoint {NAMES[3]} was not written; seen: rank 0: ")
    assert "the disk is full: " in failed, failed
