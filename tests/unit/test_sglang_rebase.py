"""`python -m scripts.sglang_rebase` writes what is applied exactly."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.sglang.unified_diff import apply_patch, parse_diff
from scripts.sglang_rebase import write

RELEASED = "".join(f"line {i}\n" for i in range(20))
FIRST = RELEASED.replace("line 3\n", "line 3\na new line\n")
SECOND = FIRST.replace("a new line", "a newer line").replace("line 17\n", "")


def git(repository: Path, *arguments: str) -> None:
    author = ["-c", "user.name=moerl", "-c", "user.email=moerl@localhost"]
    subprocess.run(["git", *author, *arguments], cwd=repository, check=True, capture_output=True)


def commit(repository: Path, name: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (repository / "sglang" / path).write_text(text)
    git(repository, "add", "--all")
    git(repository, "commit", "-m", name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "repository"
    (made / "sglang").mkdir(parents=True)
    git(made, "init", "--initial-branch", "new")
    commit(made, "0.5.99", {"one.py": RELEASED})
    git(made, "checkout", "-b", "patches")
    commit(made, "0001-one", {"one.py": FIRST})
    commit(made, "0002-two", {"one.py": SECOND, "two.py": "new\n"})
    return made


def test_every_commit_is_written_as_a_patch_that_applies_exactly(repository: Path, tmp_path: Path):
    written = write(repository, tmp_path)
    assert [path.name for path in written] == ["0001-one.patch", "0002-two.patch"]
    contents: dict[str, str | None] = {"sglang/one.py": RELEASED, "sglang/two.py": None}
    for path in written:
        for file in parse_diff(path.read_text(), path.stem):
            contents[file.path] = apply_patch(contents[file.path], file, path.stem)
    assert contents == {"sglang/one.py": SECOND, "sglang/two.py": "new\n"}


def test_a_commit_that_removes_a_file_is_refused(repository: Path, tmp_path: Path):
    git(repository, "rm", "sglang/two.py")
    git(repository, "commit", "-m", "0003-three")
    with pytest.raises(EngineError, match="0003-three"):
        write(repository, tmp_path)
    assert not (tmp_path / "0003-three.patch").exists()
