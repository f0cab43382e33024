"""Installations that `moerl sglang install` would not make: without the patches, or of another release."""

from __future__ import annotations

import shutil
from pathlib import Path

from moerl.rollout.sglang.install import site_packages
from moerl.rollout.sglang.patches import STAMP, verify_installation
from moerl.rollout.sglang.unified_diff import revert_patch


def copy_of(environment: Path, folder: Path) -> Path:
    """An environment whose `sglang` can be changed; everything else in it is a link to the one it is a copy of."""
    source = site_packages(environment)
    site = folder / source.relative_to(environment)
    site.mkdir(parents=True)
    own = ("sglang", _info(environment).name)
    for entry in source.iterdir():
        if entry.name in own:
            shutil.copytree(entry, site / entry.name)
        else:
            (site / entry.name).symlink_to(entry)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(environment / "bin" / "python")
    for name in ("pyvenv.cfg", "moerl-sglang.json"):
        shutil.copy(environment / name, folder / name)
    return folder


def take_patches_out(environment: Path) -> None:
    """The release as it was published."""
    site = site_packages(environment)
    patches = verify_installation(site)
    contents: dict[str, str | None] = {path: (site / path).read_text() for path in patches.paths}
    for patch in reversed(patches.patches):
        for file in reversed(patch.files):
            contents[file.path] = revert_patch(contents[file.path], file, patch.name)
    for path, content in contents.items():
        if content is None:
            (site / path).unlink()
        else:
            (site / path).write_text(content)
    (site / STAMP).unlink()


def rename_release(environment: Path, version: str) -> None:
    """The environment claims to hold another release."""
    info = _info(environment)
    metadata = info / "METADATA"
    held = info.name.removeprefix("sglang-").removesuffix(".dist-info")
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {held}\n", f"\nVersion: {version}\n"))
    info.rename(info.with_name(f"sglang-{version}.dist-info"))


def _info(environment: Path) -> Path:
    """Returns the folder of pip's metadata of the installed release."""
    (info,) = site_packages(environment).glob("sglang-*.dist-info")
    return info
