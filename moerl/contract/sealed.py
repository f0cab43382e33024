"""Folders that list what is in them, so that damage is seen before they are used. Any process. Checkpoints have a list
of their own, of the same facts (`moerl.trainer.checkpoint`).

A sealed folder is on disk, file by file, before it gets its name. Files that the list does not name do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from moerl.contract.files import hash_file, sync
from moerl.reading import read_file

SEAL = "moerl_files.json"
"""The list: name -> bytes and BLAKE2b hash of every file."""
MAX_SEAL_BYTES = 1 << 26
HASHING_THREADS = 8
"""Files that are hashed at a time; hashing releases the lock of the interpreter."""


class FileFacts(msgspec.Struct, forbid_unknown_fields=True):
    """Facts of a file that tell whether it is as it was written."""

    bytes: int
    """Size."""
    blake2b: str
    """Hash of the content, in hexadecimal."""


class _Seal(msgspec.Struct, forbid_unknown_fields=True):
    files: dict[str, FileFacts]


def seal(folder: Path) -> None:
    """Writes the files of a folder, which has no folders in it, through to the disk, and lists them."""
    listed = describe(folder, sorted(path for path in folder.iterdir() if path.name != SEAL))
    (folder / SEAL).write_bytes(msgspec.json.format(msgspec.json.encode(_Seal(listed)), indent=1))
    sync(folder / SEAL)
    sync(folder)


def describe(folder: Path, files: Iterable[Path]) -> dict[str, FileFacts]:
    """Syncs files of a folder, and returns their facts by path in the folder."""
    paths = list(files)
    for path in paths:
        sync(path)
    return {
        str(path.relative_to(folder)): FileFacts(path.stat().st_size, found)
        for path, found in zip(paths, _hashes(paths), strict=True)
    }


def find_change(folder: Path, files: Mapping[str, FileFacts]) -> str | None:
    """Returns the first file that is not as `describe` found it, as a text; None if all are. Raises `OSError` if one
    cannot be read."""
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts.bytes:
            return f"{name} has {path.stat().st_size} bytes, not {facts.bytes}"
    hashes = _hashes([folder / name for name in files])
    changed = [name for name, found in zip(files, hashes, strict=True) if found != files[name].blake2b]
    return f"{changed[0]} does not match its hash" if changed else None


def find_damage(folder: Path) -> str | None:
    """Returns the damage of a sealed folder, as a text; None if every file is what was written."""
    try:
        return _find_damage(folder)
    except OSError as error:
        return f"it cannot be read ({error})"


def _find_damage(folder: Path) -> str | None:
    file = folder / SEAL
    if not folder.is_dir():
        return "it is not there"
    if not file.is_file() or file.stat().st_size > MAX_SEAL_BYTES:
        return f"no {SEAL}"
    try:
        listed = msgspec.json.decode(read_file(file, MAX_SEAL_BYTES), type=_Seal).files
    except (msgspec.DecodeError, RecursionError) as error:
        return f"{SEAL} cannot be read ({error})"
    outside = [name for name in listed if Path(name).name != name]
    return f"{outside[0]} is missing" if outside else find_change(folder, listed)


def _hashes(paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(hash_file, paths))
