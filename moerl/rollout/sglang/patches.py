"""The patches of SGLang releases: read, applied to an installation, and proved.

Files that patches touch are proved by undoing the patches in memory: what comes out must be, to the byte, what the
package's own `RECORD` lists. Other files are not read. Runs on the machine of the installation; needs neither torch nor
SGLang.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from moerl.contract.files import atomic_file
from moerl.errors import EngineError
from moerl.machine.shipped import shipped_folder
from moerl.rollout.sglang.unified_diff import FilePatch, apply_patch, parse_diff, revert_patch

DEFAULT_RELEASE = "0.5.21"
"""The release that is installed unless another is asked for."""

STAMP = "sglang/patches.json"
"""In site-packages: what was applied. The server reports the fingerprint in it."""

_MADE_FOR = "which the patches were made for"
_FRESH = "install into a fresh folder: moerl sglang install --env DIR"


@dataclass(frozen=True, slots=True)
class Patch:
    """One numbered patch file."""

    name: str
    """Name of the file without `.patch`."""
    files: tuple[FilePatch, ...]
    """Changes of the diff, in order."""


@dataclass(frozen=True, slots=True)
class PatchSet:
    """All patches of a release."""

    version: str
    """Release of SGLang."""
    patches: tuple[Patch, ...]
    """Patches in the order of their numbers, in which they are applied."""
    fingerprint: str
    """Digest of release, names and contents; hexadecimal."""

    @property
    def paths(self) -> list[str]:
        """Files that the patches touch, relative to site-packages."""
        return sorted({file.path for patch in self.patches for file in patch.files})


def releases() -> tuple[str, ...]:
    """Lists the releases that there are patches for, oldest first: the folders of `patches/sglang`. No other release is
    accepted."""
    folders = (shipped_folder("patches") / "sglang").iterdir()
    return tuple(sorted((folder.name for folder in folders if folder.is_dir()), key=Version))


def release_folder(version: str) -> Path:
    """Returns the folder with patches, requirements and stand-ins of a release.

    Raises:
        EngineError: there are no patches for it.
    """
    if version not in releases():
        raise EngineError("SGLang: release", seen=version, expected=" or ".join(releases()))
    return shipped_folder("patches") / "sglang" / version


def read_patches(version: str = DEFAULT_RELEASE, folder: Path | None = None) -> PatchSet:
    """Reads the patches of `folder`, by default those of the release that belong to this version of moerl.

    Raises:
        EngineError: no such release; a file is no unified diff, or there is none.
    """
    folder = folder or release_folder(version)
    patches = []
    digest = hashlib.blake2b(version.encode(), digest_size=8)
    for path in sorted(folder.glob("[0-9]*.patch")):
        text = path.read_text()
        digest.update(f"\0{path.stem}\0{text}".encode())
        patches.append(Patch(path.stem, parse_diff(text, path.stem)))
    if not patches:
        raise EngineError("SGLang patches: none found", seen=folder, expected="numbered .patch files")
    return PatchSet(version, tuple(patches), digest.hexdigest())


def apply_patches(site: Path, patches: PatchSet) -> None:
    """Applies all patches to the package in `site`, and stamps it. Nothing is written unless all of them fit, or if
    exactly these patches are there already.

    Raises:
        EngineError: another release, other patches, or a file that is not as released.
    """
    _found_release(site, [patches.version], _MADE_FOR)
    if (site / STAMP).is_file():
        verify_patches(site, patches)
        return
    contents = {path: _read(site / path) for path in patches.paths}
    _require_released(site, patches.version, contents)
    for patch in patches.patches:
        for file in patch.files:
            contents[file.path] = apply_patch(contents[file.path], file, patch.name)
    for path, content in contents.items():
        assert content is not None
        with atomic_file(site / path) as temporary:
            temporary.write_text(content)
            temporary.chmod(0o644)
    stamp = {
        "sglang": patches.version,
        "fingerprint": patches.fingerprint,
        "patches": [patch.name for patch in patches.patches],
    }
    # Last: without the stamp nothing counts as applied.
    with atomic_file(site / STAMP) as temporary:
        temporary.write_text(json.dumps(stamp, indent=2) + "\n")
        temporary.chmod(0o644)


def verify_installation(site: Path) -> PatchSet:
    """Proves that the package in `site` is a release that there are patches for, with exactly these in the files
    that they touch.

    Returns:
        The patches, and with them the release.

    Raises:
        EngineError: another release, or none; otherwise as `verify_patches`.
    """
    patches = read_patches(_found_release(site, releases(), "which there are patches for"))
    verify_patches(site, patches)
    return patches


def verify_patches(site: Path, patches: PatchSet) -> None:
    """Proves that the files in `site` that these patches touch are those of the release with exactly these patches.

    Raises:
        EngineError: naming the release, the stamp or the first file that is not.
    """
    _found_release(site, [patches.version], _MADE_FOR)
    seen = stamped(site)
    if seen != patches.fingerprint:
        raise EngineError(
            f"SGLang in {site}: " + ("other patches" if seen else "not patched"),
            seen=f"patch fingerprint {seen}",
            expected=patches.fingerprint,
            remedy=_FRESH,
        )
    contents = {path: _read(site / path) for path in patches.paths}
    for patch in reversed(patches.patches):
        for file in reversed(patch.files):
            contents[file.path] = revert_patch(contents[file.path], file, patch.name)
    _require_released(site, patches.version, contents)


def stamped(site: Path) -> str | None:
    """Returns the fingerprint of the patches that were applied, which `verify_patches` proves; None if there are none,
    or the stamp says nothing."""
    try:
        return str(json.loads((site / STAMP).read_text())["fingerprint"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _found_release(site: Path, versions: Sequence[str], why: str) -> str:
    """Returns the release of SGLang in `site`. Raises EngineError if it is none of `versions`, for the reason `why`."""
    found = sorted(path.name[len("sglang-") : -len(".dist-info")] for path in site.glob("sglang-*.dist-info"))
    if len(found) != 1 or found[0] not in versions:
        seen, expected = ", ".join(found) or "not installed", f"sglang {' or '.join(versions)}, {why}"
        raise EngineError(f"SGLang in {site}", seen=seen, expected=expected, remedy=_FRESH)
    return found[0]


def _require_released(site: Path, version: str, contents: Mapping[str, str | None]) -> None:
    """Raises EngineError unless every file is as the package's RECORD lists it; None stands for a file that the release
    has not."""
    record = site / f"sglang-{version}.dist-info" / "RECORD"
    if not record.is_file():
        raise EngineError(f"SGLang in {site}: no list of its files", expected=record, remedy=_FRESH)
    released = {row[0]: row[1] for row in csv.reader(record.read_text().splitlines()) if len(row) > 1}
    for path, content in contents.items():
        expected = released.get(path)
        seen = None
        if content is not None:
            digest = hashlib.sha256(content.encode(errors="surrogateescape")).digest()
            seen = "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if seen != expected:
            raise EngineError(
                f"SGLang in {site}: {path} is not as released", seen=seen, expected=expected, remedy=_FRESH
            )


def _read(path: Path) -> str | None:
    """Returns the text of a file, None if there is none. Bytes that are no text stay such, so that no released file
    equals them."""
    return path.read_bytes().decode(errors="surrogateescape") if path.is_file() else None
