"""Folders that list what is in them, so that damage is seen before they are used. Any process.

A sealed folder is on disk, file by file, before it gets its name. Files that the list does not name do not count.
"""

from __future__ import annotations

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


class _Facts(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    blake2b: str


class _Seal(msgspec.Struct, forbid_unknown_fields=True):
    files: dict[str, _Facts]


def seal(folder: Path) -> None:
    """Writes the files of a folder, which has no folders in it, through to the disk, and lists them."""
    files = sorted(path for path in folder.iterdir() if path.name != SEAL)
    for path in files:
        sync(path)
    listed = {path.name: _Facts(path.stat().st_size, found) for path, found in zip(files, _hashes(files), strict=True)}
    (folder / SEAL).write_bytes(msgspec.json.format(msgspec.json.encode(_Seal(listed)), indent=1))
    sync(folder / SEAL)
    sync(folder)


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
    paths = {name: folder / name for name in listed}
    for name, path in paths.items():
        if Path(name).name != name or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != listed[name].bytes:
            return f"{name} has {path.stat().st_size} bytes, not {listed[name].bytes}"
    for name, found in zip(paths, _hashes(list(paths.values())), strict=True):
        if found != listed[name].blake2b:
            return f"{name} does not match its hash"
    return None


def _hashes(paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(hash_file, paths))
