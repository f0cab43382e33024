"""Restrictions of the process that calls `restrict`, for good. Runs in the sandbox.

- Landlock: the process reads Python, its packages and system libraries, and writes below one folder; it opens no other
  file.
- seccomp (`moerl.tasks.rewards.sandbox.calls`): no sockets, processes, programs, signals to others, sessions, tracing,
  shared memory, change of owners, modes or times, mounts, namespaces, io_uring, bpf, keys, clocks. Such a call fails
  with EPERM.
- limits: address space, CPU time, size of a file, open files. No capabilities; no new privileges.
- The process dies with the thread that started it.

It can still use the CPU and memory that it is given, fill the folder with files, learn the time, and read the files
that the interpreter may read.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
import sys
from typing import NamedTuple

from moerl.tasks.rewards.sandbox.calls import forbid_calls

MAX_FILE_BYTES = 16 << 20
MAX_OPEN_FILES = 64

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")


class Limits(NamedTuple):
    """Resources that a process may use."""

    folder: str
    """Folder that it may write below."""
    seconds: float
    """CPU time; it may take one second more."""
    memory_bytes: int
    """Address space."""


class NoSandboxError(Exception):
    """A machine that cannot forbid what must be forbidden."""


def restrict(limits: Limits, parent: int) -> None:
    """Restricts this process, for good, as the module's docstring says.

    Args:
        parent: process id of its parent, with which it dies.

    Raises:
        NoSandboxError: this machine cannot restrict a process so, or the parent is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(limits.seconds) + 1),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _allow_files(libc, limits.folder)
    # Root without capabilities is a user who owns root's files.
    _check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capabilities")
    _check(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "no dumps")
    _check(libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "end with the parent")
    if os.getppid() != parent:
        raise NoSandboxError("the process that started the sandbox is gone")
    if problem := forbid_calls(libc):
        raise NoSandboxError(f"seccomp: {problem}")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise NoSandboxError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _allow_files(libc: ctypes.CDLL, folder: str) -> None:
    """Forbids every file but those that are named here, by Landlock (Linux 5.13)."""
    abi = _check(libc.syscall(444, None, ctypes.c_size_t(0), 1), "Landlock, Linux 5.13 or later")
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    # Rights over files, TCP ports, and (to others outside) abstract sockets and signals.
    ruleset = struct.pack("=QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16}.get(abi, 24)
    rules = _check(libc.syscall(444, ruleset[:size], ctypes.c_size_t(size), 0), "Landlock")
    execute, write, read, read_dir, truncate = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
    devices = (1 << 6) | (1 << 9) | (1 << 10) | (1 << 11) | (1 << 15)
    for path in {*_READ_ONLY, sys.prefix, sys.base_prefix, sys.exec_prefix}:
        _allow(libc, rules, path, read | (read_dir | execute if os.path.isdir(path) else 0))
    _allow(libc, rules, "/dev/null", (read | write | truncate) & rights)
    _allow(libc, rules, folder, rights & ~devices)
    _check(libc.syscall(446, rules, 0), "Landlock")
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    _check(libc.syscall(445, rules, 1, struct.pack("=Qi", rights, beneath), 0), f"Landlock, {path}")
    os.close(beneath)
