"""Files that appear whole or not at all, and who may read them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from moerl.contract.files import atomic_file, write_folder, writing
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


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoerlError, match=f"cannot write {tmp_path}; seen: No space left on device"), writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
