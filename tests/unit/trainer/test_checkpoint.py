from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moerl.errors import CheckpointError
from moerl.trainer.checkpoint import CheckpointStore, describe, find_problem


def write(store: CheckpointStore, step: int) -> Path:
    name = f"step-{step:06d}"
    folder = store.begin(name)
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_bytes(b"weights" * step)
    (folder / "__0_0.distcp").write_bytes(b"state" * step)
    return commit(store, name, {"step": step})


def commit(store: CheckpointStore, name: str, state: dict[str, Any]) -> Path:
    folder = store.partial(name)
    return store.commit(name, state, describe(folder, (path for path in folder.rglob("*") if path.is_file())))


def test_the_newest_checkpoint_comes_back_with_its_state_and_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    assert store.latest() is None
    for step in (1, 2, 10):
        write(store, step)
    latest = CheckpointStore(tmp_path / "checkpoints", keep=3).latest()
    assert latest is not None
    assert latest.state == {"step": 10}
    assert latest.skipped == ()
    assert (latest.path / "sub" / "weights").read_bytes() == b"weights" * 10


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        write(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_an_interrupted_write_does_not_count_and_leaves_nothing_in_the_next_attempt(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    (store.begin("step-000002") / "leftover").write_bytes(b"half a file")
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 1}
    assert latest.skipped == ()
    assert not (write(store, 2) / "leftover").exists()


def test_a_crash_while_hashing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    monkeypatch.setattr(Path, "rename", lambda *paths: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        write(store, 2)
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 1}


def test_a_checkpoint_written_twice_is_the_second_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    folder = store.begin("step-000001")
    (folder / "other").write_bytes(b"again")
    commit(store, "step-000001", {"step": 1, "again": True})
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 1, "again": True}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_file_that_no_rank_described_is_not_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    folder = store.begin("step-000002")
    (folder / "__0_0.distcp").write_bytes(b"mine")
    files = describe(folder, [folder / "__0_0.distcp"])
    (folder / "__1_0.distcp").write_bytes(b"of a rank that said nothing")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        store.commit("step-000002", {}, files)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        store.commit("step-000002", {}, {})
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 1}


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    (store.begin("step-000002") / "__0_0.distcp").write_bytes(b"half")
    store.abandon("step-000002")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_the_next_attempt_removes_what_an_earlier_one_left_under_another_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (store.begin("step-000001") / "__0_0.distcp").write_bytes(b"half")
    write(store, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def flip_a_byte(folder: Path) -> None:
    file = folder / "sub" / "weights"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def truncate_a_file(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def break_the_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:-40])


def change_the_state(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 2'))


def empty_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip_a_byte, "sub/weights does not match its hash"),
        (truncate_a_file, "__0_0.distcp has 14 bytes, not 15"),
        (lambda folder: (folder / "sub" / "weights").unlink(), "sub/weights is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
        (break_the_manifest, "unreadable manifest"),
        (change_the_state, "the manifest does not match its own hash"),
        (empty_the_manifest, "the manifest does not match its own hash"),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_is_named(
    damage: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    write(store, 2)
    newest = write(store, 3)
    assert find_problem(newest) is None
    damage(newest)
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 2}
    (skipped,) = latest.skipped
    assert skipped.startswith("step-000003: ")
    assert problem in skipped
    assert newest.exists()


def test_a_checkpoint_of_another_format_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    monkeypatch.setattr("moerl.trainer.checkpoint.FORMAT", 99)
    with pytest.raises(CheckpointError, match="format 2, not 99"):
        store.latest()


def test_a_corrupt_checkpoint_does_not_push_out_the_valid_one_before_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    flip_a_byte(write(store, 9))
    assert store.latest() is not None
    flip_a_byte(write(store, 2))
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 1}
    for step in (3, 4):
        write(store, step)
    assert sorted(path.name for path in tmp_path.iterdir())[-3:] == ["step-000003", "step-000004", "step-000009"]


def test_no_valid_checkpoint_is_an_error_that_names_every_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        flip_a_byte(write(store, step))
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    assert "step-000002: sub/weights" in str(caught.value)
    assert "step-000001: sub/weights" in str(caught.value)
