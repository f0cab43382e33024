"""Files and folders that appear whole or not at all: temporary name, fsync, rename. Any process."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from moerl.errors import MoerlError, ending, undoing

_MEND = "make room, or mend what is named, and go on from the last checkpoint"


def writing(path: Path, remedy: str = _MEND) -> AbstractContextManager[None]:
    """Names the file or folder that could not be written, in place of an error of the operating system.

    Args:
        remedy: advice for the error, for writers outside of a run that has checkpoints.

    Raises:
        MoerlError: the file system refused.
    """
    return _naming(f"cannot write {path}", "room and the right to write there", remedy)


def reading(path: Path) -> AbstractContextManager[None]:
    """Names the file that could not be read, in place of an error of the operating system.

    Raises:
        MoerlError: the file system refused.
    """
    remedy = "mend what is named, or restore the file from a copy"
    return _naming(f"cannot read {path}", "a file that this process may read", remedy)


@contextmanager
def _naming(what: str, expected: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MoerlError(what, seen=error.strerror or str(error), expected=expected, remedy=remedy) from error


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields a temporary path next to `path`; renames it to `path` when the block ends without an error.

    Args:
        mode: permissions, less the umask; the temporary file has them from the first moment.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex}.tmp")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        with undoing(lambda: discard(temporary)):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        # The system names no file for a full disk, and the name of the temporary one helps nobody.
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
            if error.filename2 is not None:
                del error.filename2
        raise


def replace_folder(partial: Path, folder: Path) -> None:
    """Gives a folder, whose files are on the disk, its name, and removes what had that name before; the new name is on
    the disk, too."""
    for place, _, _ in os.walk(partial):
        sync(Path(place))
    remove(folder)
    os.rename(partial, folder)
    sync(folder.parent)


def remove(path: Path) -> None:
    """Removes a folder, a file or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Removes a file that nobody needs any more; one that cannot be removed does no harm."""
    with suppress(OSError):
        path.unlink()


def append_line(path: Path, line: str) -> None:
    """Appends a line, which is on the disk on return. First cuts off a last line without an end, which a full disk or a
    crash has left.

    Raises:
        MoerlError: the file system refused.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with ending(lambda: os.close(file)):
            data = path.read_bytes()
            cut_back(file, len(data), data.rfind(b"\n") + 1)
            write_all(file, f"{line}\n".encode())
            os.fsync(file)


def cut_back(file: int, size: int, end: int) -> None:
    """Cuts off what an open file of this size has behind `end`; the cut is on the disk, too, before anything is written
    behind it."""
    if end < size:
        os.ftruncate(file, end)
        os.fsync(file)


def write_all(file: int, data: bytes) -> None:
    """Writes without a buffer, which would try again when the file is closed. A write that meets a limit may write a
    part; the next write then raises the reason."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def write_folder(parent: Path, name: str, contents: Mapping[str, bytes]) -> Path:
    """Writes a new folder `parent/name` with `contents`, by file name; `name-2`, `name-3`... if the name exists.
    Returns its path.

    The folder appears with all its files or not at all, and never replaces another, even if other processes write here.
    """
    parent.mkdir(parents=True, exist_ok=True)
    # Unlike those of tempfile, this folder and the file above follow the umask.
    temporary = parent / f".writing-{uuid.uuid4().hex}"
    temporary.mkdir()
    with undoing(lambda: shutil.rmtree(temporary, ignore_errors=True)):
        for file_name, data in contents.items():
            file = temporary / file_name
            file.write_bytes(data)
            sync(file)
        sync(temporary)
        final = _rename_to_free_name(temporary, parent, name)
    sync(parent)
    return final


def _rename_to_free_name(temporary: Path, parent: Path, name: str) -> Path:
    attempt = 1
    while True:
        final = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            # Fails on a folder with content, so of two writers of one name the second moves on.
            os.rename(temporary, final)
        except OSError:
            if not final.exists():
                raise
            attempt += 1
        else:
            return final


def hash_file(path: Path) -> str:
    """Returns the BLAKE2b hash of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def sync(path: Path) -> None:
    """Writes a file or a directory entry through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    with ending(lambda: os.close(handle)):
        os.fsync(handle)
