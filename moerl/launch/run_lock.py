"""One run directory, one run: a lock that the kernel releases however its process ends. Torch-free.

The controller locks the directory, and its ranks inherit the lock: the directory is free when all of them are gone.
Whoever can open a file, if only for reading, can lock it; so the file is its owner's alone (mode 0600).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from moerl.contract.files import discard
from moerl.errors import ConfigError, ending, undoing
from moerl.processes.parent import is_running

LOCK_FILE = "run.lock"
WAIT_SECONDS = 0.5
"""Seconds that the process with the lock gets to end."""
LEAVING_SECONDS = 10.0
"""Seconds that ranks get to end if their controller is gone: the kernel of a busy machine frees their memory slowly."""
_POLL_SECONDS = 0.05
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
"""Neither a link to another file nor a pipe: opening one of these would lock something else, or wait."""


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[int]:
    """Locks a run directory inside of the `with`; yields the lock's descriptor, for ranks to inherit.

    The directory is made if needed, and removed again if nothing was put into it.

    Raises:
        ConfigError: another process holds the lock; nothing can be written there; its file system has no locks.
    """
    is_new = not run_dir.exists()
    try:
        descriptor = _acquire(run_dir)
    except OSError as error:
        raise ConfigError(
            "run_dir: cannot be written",
            seen=f"{run_dir}: {error.strerror or error}",
            expected="a directory that this process may make and write to",
            remedy="choose another run_dir, or change what is named",
        ) from error
    with ending(lambda: _release(run_dir, descriptor, is_new=is_new)):
        yield descriptor


def _release(run_dir: Path, descriptor: int, *, is_new: bool) -> None:
    # Before the lock is released: whoever opened the file before sees that it is gone, and makes another. If it cannot
    # be removed, the next run locks it.
    discard(run_dir / LOCK_FILE)
    if is_new:
        with contextlib.suppress(OSError):  # a run left its files there
            run_dir.rmdir()
    os.close(descriptor)


def holder(run_dir: Path) -> str:
    """Says which process and host have locked a run directory; returns an empty text if nobody has.

    Waits up to `LEAVING_SECONDS` for ranks whose controller was just killed.
    """
    start = time.monotonic()
    while True:
        try:
            with open(os.open(run_dir / LOCK_FILE, os.O_RDONLY | _FLAGS), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return ""
        except PermissionError:
            return f"perhaps: the lock is of {_owner(run_dir / LOCK_FILE)}, who alone can open it"
        except BlockingIOError:
            if not _is_gone(run_dir) or time.monotonic() > start + LEAVING_SECONDS:
                return _described(run_dir)
            time.sleep(_POLL_SECONDS)
        else:
            return ""


def _acquire(run_dir: Path) -> int:
    start = time.monotonic()
    while True:
        descriptor = _try(run_dir)
        if descriptor is not None:
            return descriptor
        if time.monotonic() > start + (LEAVING_SECONDS if _is_gone(run_dir) else WAIT_SECONDS):
            raise ConfigError(
                "run_dir: another run is using it",
                seen=f"{run_dir}, locked by {_described(run_dir)}",
                expected="a run directory that no other process uses",
                remedy="wait until that run has ended or stop it, or choose another run_dir",
            )
        time.sleep(_POLL_SECONDS)


def _try(run_dir: Path) -> int | None:
    """Returns the descriptor of the locked file; None if another process has locked it, or removed it meanwhile."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    try:
        # For writing: NFS has no exclusive lock on what is open for reading alone.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    except FileNotFoundError:
        # The run before removed the directory that it had made.
        return None
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno == errno.ELOOP:
            _check_ours(path, path.lstat())
        raise
    with undoing(lambda: os.close(descriptor)):
        status = os.fstat(descriptor)
        _check_ours(path, status)
        if status.st_mode & 0o077:  # an older run left it open to others
            os.fchmod(descriptor, 0o600)
        is_ours = _lock(descriptor, path) and _is_still_there(descriptor, path)
        if is_ours:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
    if not is_ours:
        os.close(descriptor)
        return None
    return descriptor


def _check_ours(path: Path, status: os.stat_result) -> None:
    """Raises `ConfigError` if somebody else made the file, or it is no regular file: others could lock it."""
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFREG: f"another user's ({_owner(path)})"}
    raise ConfigError(
        f"run_dir: {path.name} is not ours, and others may hold its lock",
        seen=f"{path}: {kinds.get(stat.S_IFMT(status.st_mode), 'no file')}",
        expected="a file of the user who starts the run, or none",
        remedy="see that no run of another user is at work there, and remove it, or choose another run_dir",
    )


def _owner(path: Path) -> str:
    try:
        return f"user {path.lstat().st_uid}"
    except OSError:
        return "a user that cannot be seen"


def _lock(descriptor: int, path: Path) -> bool:
    """Locks the file; returns False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            "run_dir: its file system cannot lock files, so nothing would keep a second run out",
            seen=f"flock of {path}: {error.strerror or error}",
            expected="a file system with flock",
            remedy="choose a run_dir on another file system, or mount this one with locks (Lustre: -o flock; NFS: with"
            " a lock service)",
        ) from error
    return True


def _is_still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _named(run_dir: Path) -> tuple[int, str] | None:
    """Returns the process and the host that the lock file names; None if it names none yet."""
    try:
        holder = json.loads((run_dir / LOCK_FILE).read_text())
        return int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_gone(run_dir: Path) -> bool:
    """Returns whether the process that locked the directory was on this host and has ended. If the lock is not free
    then, a process that it started has it."""
    named = _named(run_dir)
    return named is not None and named[1] == socket.gethostname() and not is_running(named[0])


def _described(run_dir: Path) -> str:
    named, other = _named(run_dir), _kernel_names(run_dir / LOCK_FILE)
    if other is not None and (named is None or other != named[0]):
        return f"process {other} ({_command(other)}) on this host, which is no run"
    if named is None:
        return "a process that has not written its name yet"
    gone = ", which is gone, but not all that it started" if _is_gone(run_dir) else ""
    return f"process {named[0]} on host {named[1]}{gone}"


def _kernel_names(path: Path) -> int | None:
    """Returns the process on this host that locked the file, as the kernel says; None if the kernel names none.

    An inherited lock stays in the name of the process that locked the file.
    """
    try:
        status, locks = path.stat(), Path("/proc/locks").read_text()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for _, kind, _, _, pid, where, *_ in (line.split() for line in locks.splitlines() if "->" not in line):
        if kind == "FLOCK" and where == place and int(pid) > 0:
            return int(pid)
    return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
