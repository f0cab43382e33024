"""Rebases the patches of one SGLang release onto another one. Needs git and pip; no server is started.

`begin` puts both releases into a git repository, the patches of the older one as commits on it, and rebases them.
`write` writes the rebased commits as patches of the newer one. docs/sglang.md has the whole routine.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from moerl.errors import EngineError
from moerl.machine.shipped import shipped_folder
from moerl.rollout.sglang.patches import read_patches, release_folder
from moerl.rollout.sglang.unified_diff import parse_diff

_GIT_HEADERS = re.compile(r"^(?:diff --git|index|new file mode) .*\n", re.MULTILINE)
_CONFIG = {"user.name": "moerl", "user.email": "moerl@localhost", "core.autocrlf": "false"}


def begin(old: str, new: str, folder: Path) -> int:
    """Makes the repository in `folder` and starts the rebase. The status of `git rebase`: 1 if patches conflict."""
    _wheel(old, folder)
    _wheel(new, folder)
    repository = folder / "repository"
    repository.mkdir()
    _git(repository, "init", "--quiet", "--initial-branch", "old")
    for name, value in _CONFIG.items():
        _git(repository, "config", name, value)
    _commit(repository, folder / old, old)
    _git(repository, "checkout", "--quiet", "-b", "new")
    _commit(repository, folder / new, new)
    _git(repository, "checkout", "--quiet", "-b", "patches", "old")
    for patch in read_patches(old).patches:
        _git(repository, "apply", str(release_folder(old) / f"{patch.name}.patch"))
        _git(repository, "add", "--force", "--all")
        _git(repository, "commit", "--quiet", "--message", patch.name)
    _print_pins(folder, old, new)
    return subprocess.run(["git", "rebase", "--onto", "new", "old", "patches"], cwd=repository).returncode


def write(repository: Path, folder: Path) -> list[Path]:
    """Writes the commits between the branches `new` and `patches` into `folder`, in the form that is applied exactly.

    Raises:
        EngineError: a commit removes or renames a file.
    """
    written = list[Path]()
    for commit in _git(repository, "rev-list", "--reverse", "new..patches").split():
        name = _git(repository, "log", "-1", "--format=%s", commit).strip()
        plain = ["diff", "--no-color", "--no-renames", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/"]
        text = _GIT_HEADERS.sub("", _git(repository, *plain, f"{commit}^", commit))
        parse_diff(text, name)
        written.append(folder / f"{name}.patch")
        written[-1].write_text(text)
    return written


def _wheel(version: str, folder: Path) -> None:
    """The release as it was published, in a folder of its own."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), f"sglang=={version}"], check=True)
    (wheel,) = folder.glob(f"sglang-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / version)


def _commit(repository: Path, release: Path, version: str) -> None:
    shutil.rmtree(repository / "sglang", ignore_errors=True)
    shutil.copytree(release / "sglang", repository / "sglang")
    _git(repository, "add", "--force", "--all")
    _git(repository, "commit", "--quiet", "--message", version)


def _print_pins(folder: Path, old: str, new: str) -> None:
    """Prints changed requirements of the newer release, for cpu/requirements.txt, cpu/packages.txt and pythons.txt."""
    needs = [set(_needs(folder / version / f"sglang-{version}.dist-info" / "METADATA")) for version in (old, new)]
    for sign, lines in (("-", needs[0] - needs[1]), ("+", needs[1] - needs[0])):
        for line in sorted(lines):
            print(sign, line, flush=True)


def _needs(metadata: Path) -> list[str]:
    lines = metadata.read_text().splitlines()
    return [line for line in lines if line.startswith("Requires-") and "extra ==" not in line]


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True)
    if done.returncode != 0:
        raise EngineError(f"git {arguments[0]} in {repository}", seen=done.stderr.strip(), expected="status 0")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("begin", "write"))
    parser.add_argument("old", help="release that there are patches for")
    parser.add_argument("new", help="release that there shall be patches for")
    parser.add_argument("--folder", type=Path, required=True, help="new and empty for begin; the same for write")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.step == "begin":
        folder.mkdir(parents=True)
        return begin(options.old, options.new, folder)
    target = shipped_folder("patches") / "sglang" / options.new
    # What is not a patch is the older release's until somebody edits it.
    shutil.copytree(release_folder(options.old), target, ignore=shutil.ignore_patterns("*.patch"))
    for path in write(folder / "repository", target):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
