"""Files that appear whole or not at all, and who may read them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import full_disk, power_may_go

from moerl.contract.files import append_line, atomic_file, replace_folder, sync, write_folder, writing
from moerl.errors import MoerlError


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_follow_the_umask(umask: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with atomic_file(file) as path:
        path.write_text("x")
    assert mode_of(file) == 0o666 & ~umask
    folder = write_folder(tmp_path, "folder", {"inside": b"x"})
    assert mode_of(folder) == 0o777 & ~umask
    assert mode_of(folder / "inside") == 0o666 & ~umask


def test_a_secret_is_its_owners_from_the_first_moment(umask: int, tmp_path: Path) -> None:
    with atomic_file(tmp_path / "keys", mode=0o600) as path:
        assert mode_of(path) == 0o600
        path.write_text("x")
    assert mode_of(tmp_path / "keys") == 0o600


def test_files_and_folders_have_their_names_only_once_all_of_them_is_on_the_disk(tmp_path: Path) -> None:
    with power_may_go() as disk:
        with atomic_file(tmp_path / "a" / "file") as path:
            path.write_text("x")
        write_folder(tmp_path / "b", "record", {"one": b"1", "two": b"2"})
        partial = tmp_path / "c" / ".folder.partial"
        (partial / "inside").mkdir(parents=True)
        (partial / "inside" / "file").write_bytes(b"x")
        sync(partial / "inside" / "file")
        replace_folder(partial, tmp_path / "c" / "folder")
    assert [path.name for path in disk.renamed] == ["file", "record", "folder"]
    assert disk.lost() == []


def test_what_is_not_on_the_disk_is_seen_by_these_tests(tmp_path: Path) -> None:
    with power_may_go() as disk:
        (tmp_path / "a").write_text("x")
        os.rename(tmp_path / "a", tmp_path / "b")
    assert disk.lost() == ["a as it got its name", f"names in {tmp_path}"]


def test_a_line_is_on_the_disk_when_it_is_appended(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    with power_may_go() as disk:
        append_line(file, "one")
        append_line(file, "two")
        os.rename(file, tmp_path / "moved")
    assert disk.lost() == [f"names in {tmp_path}"]


def test_a_torn_line_is_cut_off_before_the_next_is_appended(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    append_line(file, "one")
    with full_disk(6), pytest.raises(MoerlError, match=f"cannot write {file}; seen: File too large"):
        append_line(file, "two")
    assert file.read_bytes() == b"one\ntw"
    append_line(file, "three")
    assert file.read_bytes() == b"one\nthree\n"


def test_a_full_disk_is_told_with_the_name_that_the_file_was_to_have(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with full_disk(6), pytest.raises(OSError, match="File too large") as caught, atomic_file(path) as temporary:
        temporary.write_bytes(bytes(7))
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_cleared_up_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "file"):
        raise ZeroDivisionError


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoerlError, match=f"cannot write {tmp_path}; seen: No space left on device"), writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
