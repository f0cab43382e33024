from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import power_may_go

from moerl.contract.sealed import describe
from moerl.errors import CheckpointError
from moerl.trainer.checkpoint import CheckpointStore, _hash_of, checkpoint_names, find_problem


def state_of(step: int, stage: str = "rl") -> dict[str, Any]:
    return {"stage": stage, "step": step}


def write(store: CheckpointStore, step: int, stage: str = "rl") -> Path:
    name = f"{('sft', 'rl').index(stage)}-{stage}-{step:06d}"
    folder = store.begin(name)
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_bytes(b"weights" * step)
    (folder / "__0_0.distcp").write_bytes(b"state" * step)
    return commit(store, name, state_of(step, stage))


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
    assert latest.state == state_of(10)
    assert latest.skipped == ()
    assert (latest.path / "sub" / "weights").read_bytes() == b"weights" * 10


def test_a_checkpoint_has_its_name_only_once_all_of_it_is_on_the_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    with power_may_go() as disk:
        for step in (1, 2, 2):
            write(store, step)
    names = ["1-rl-000001", "last_checkpoint.txt", *["1-rl-000002", "last_checkpoint.txt"] * 2]
    assert [path.name for path in disk.renamed] == names
    assert disk.lost() == []


def test_a_damaged_note_of_the_last_checkpoint_still_says_that_there_was_one(tmp_path: Path) -> None:
    (tmp_path / "last_checkpoint.txt").write_bytes(b"rl-\xff")
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).last_written() == "rl-\\xff"


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        write(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-rl-000003", "1-rl-000004"]


def test_an_interrupted_write_does_not_count_and_leaves_nothing_in_the_next_attempt(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    (store.begin("1-rl-000002") / "leftover").write_bytes(b"half a file")
    latest = store.latest()
    assert latest is not None
    assert latest.state == state_of(1)
    assert latest.skipped == ()
    assert not (write(store, 2) / "leftover").exists()


def test_a_crash_while_hashing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    monkeypatch.setattr(os, "rename", lambda *paths: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        write(store, 2)
    latest = store.latest()
    assert latest is not None
    assert latest.state == state_of(1)


def test_a_checkpoint_written_twice_is_the_second_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    folder = store.begin("1-rl-000001")
    (folder / "other").write_bytes(b"again")
    commit(store, "1-rl-000001", {**state_of(1), "again": True})
    latest = store.latest()
    assert latest is not None
    assert latest.state == {**state_of(1), "again": True}
    assert [path.name for path in tmp_path.iterdir()] == ["1-rl-000001"]


def test_a_file_that_no_rank_described_is_not_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    folder = store.begin("1-rl-000002")
    (folder / "__0_0.distcp").write_bytes(b"mine")
    files = describe(folder, [folder / "__0_0.distcp"])
    (folder / "__1_0.distcp").write_bytes(b"of a rank that said nothing")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        store.commit("1-rl-000002", {}, files)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        store.commit("1-rl-000002", {}, {})
    latest = store.latest()
    assert latest is not None
    assert latest.state == state_of(1)


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    (store.begin("1-rl-000002") / "__0_0.distcp").write_bytes(b"half")
    store.abandon("1-rl-000002")
    assert [path.name for path in tmp_path.iterdir()] == ["1-rl-000001"]


def test_the_next_attempt_removes_what_an_earlier_one_left_under_another_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (store.begin("1-rl-000001") / "__0_0.distcp").write_bytes(b"half")
    write(store, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["1-rl-000002"]


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


def a_directory_in_its_place(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def a_pipe_in_its_place(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def a_huge_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 1 << 33)


def a_link_to_itself(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("manifest.json")


def a_file_in_place_of_the_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


def rewritten(**changes: Any) -> Callable[[Path], None]:
    """A manifest with a hash that fits its content: another program wrote it. None leaves a key out."""

    def write_again(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text()) | changes
        content = {key: value for key, value in content.items() if value is not None and key != "blake2b"}
        (folder / "manifest.json").write_text(json.dumps({**content, "blake2b": _hash_of(content)}))

    return write_again


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
        (a_directory_in_its_place, "manifest.json is not a file"),
        (a_pipe_in_its_place, "manifest.json is not a file"),
        (a_huge_manifest, "a manifest of 8589934592 bytes"),
        (a_link_to_itself, "no manifest"),
        (a_file_in_place_of_the_checkpoint, "no manifest"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "unreadable manifest"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"), "unreadable manifest"),
        (rewritten(files=None), "the manifest has no mapping 'files'"),
        (rewritten(files=[["a", 1]]), "the manifest has no mapping 'files'"),
        (rewritten(files={"sub/weights": 21}), "the manifest lists 'sub/weights' as 21"),
        (rewritten(files={"sub/weights": {"bytes": 21}}), "the manifest lists 'sub/weights' as "),
        (rewritten(files={"../other": {"bytes": 1, "blake2b": ""}}), "the manifest lists '../other' as "),
        (rewritten(files={"/etc/passwd": {"bytes": 1, "blake2b": ""}}), "the manifest lists '/etc/passwd' as "),
        (rewritten(state=None), "the manifest has no mapping 'state'"),
        (rewritten(state="rl"), "the manifest has no mapping 'state'"),
        (rewritten(state={}), "it holds step None of stage None"),
        (rewritten(format=None), "format None, not 2"),
        (rewritten(format=[2]), "format [2], not 2"),
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
    assert latest.state == state_of(2)
    (skipped,) = latest.skipped
    assert skipped.startswith("1-rl-000003: ")
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
    assert latest.state == state_of(1)
    for step in (3, 4):
        write(store, step)
    assert sorted(path.name for path in tmp_path.iterdir())[-3:] == ["1-rl-000003", "1-rl-000004", "1-rl-000009"]


def test_no_valid_checkpoint_is_an_error_that_names_every_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        flip_a_byte(write(store, step))
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    assert "1-rl-000002: sub/weights" in str(caught.value)
    assert "1-rl-000001: sub/weights" in str(caught.value)


# --- names -----------------------------------------------------------------------------------------------------------


FOREIGN = ("best", "0-my-backup", "1-rl-000002.old", "01-rl-000009", "1-rl-9", "1-RL-000009", "1-rl-000009-copy")


def copy_of(checkpoint: Path, name: str) -> Path:
    return shutil.copytree(checkpoint, checkpoint.with_name(name))


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_another_name_is_neither_resumed_from_nor_removed(name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    backup = copy_of(write(store, 1), name)
    for step in (2, 3, 4):
        write(store, step)
    latest = store.latest()
    assert latest is not None
    assert latest.state == state_of(4)
    assert latest.skipped == ()
    assert checkpoint_names(store.folder) == ["1-rl-000003", "1-rl-000004"]
    assert (backup / "manifest.json").is_file()


def test_foreign_folders_alone_are_no_checkpoints(tmp_path: Path) -> None:
    for name in FOREIGN:
        (tmp_path / name).mkdir()
    assert CheckpointStore(tmp_path, keep=1).latest() is None


def test_leftovers_of_other_programs_are_not_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / ".rsync.partial").mkdir()
    (tmp_path / ".1-rl-000001.partial").mkdir()
    write(store, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rsync.partial", "1-rl-000002"]


def test_a_copy_under_the_name_of_a_later_step_is_not_that_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    copy_of(write(store, 1), "1-rl-000050")
    write(store, 2)
    latest = store.latest()
    assert latest is not None
    assert latest.state == state_of(2)
    assert latest.skipped == ("1-rl-000050: it holds step 1 of stage rl: a copy under another name",)


def test_steps_are_ordered_as_numbers_past_six_digits(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (999_998, 999_999, 1_000_000):
        write(store, step)
    latest = store.latest()
    assert latest is not None
    assert latest.state == state_of(1_000_000)
    assert checkpoint_names(store.folder) == ["1-rl-999999", "1-rl-1000000"]
    write(store, 1, stage="sft")
    assert checkpoint_names(store.folder) == ["1-rl-999999", "1-rl-1000000"]


def test_a_state_that_cannot_be_used_counts_as_damage(tmp_path: Path) -> None:
    def find_state_problem(state: dict[str, Any]) -> str | None:
        return "of the future" if state["step"] == 3 else None

    store = CheckpointStore(tmp_path, keep=3, find_state_problem=find_state_problem)
    for step in (1, 2, 3):
        write(store, step)
    latest = store.latest()
    assert latest is not None
    assert latest.state == state_of(2)
    assert latest.skipped == ("1-rl-000003: of the future",)
