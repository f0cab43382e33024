"""Runs a program that nobody has looked at. Started by `moerl.tasks.rewards.code` as a script, so it imports the
standard library alone.

    sandbox.py PROGRAM FOLDER DONE SECONDS MEMORY

PROGRAM is a file with Python, read before anything is forbidden. DONE is a descriptor: what can be read from it is
written to standard error, behind `DONE_MARK`, once the program has come to its end by itself. The process restricts
itself for good, and only then runs the program:

- Landlock: it reads Python, its packages and system libraries, and writes below FOLDER; it opens no other file.
- seccomp: no sockets, processes, programs, signals to others, tracing, shared memory, change of owners, modes or times,
  mounts, namespaces, io_uring, bpf, keys, clocks. Such a call fails with EPERM.
- limits: address space, CPU time, size of a file, open files. No capabilities; no new privileges.

What it can still do: use the CPU and memory that it is given, fill FOLDER with files, learn the time, and read what the
interpreter may read. All of it is one process, which whoever started it ends.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import struct
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

ERROR, MEMORY, BLOCKED, NO_SANDBOX = 1, 91, 92, 93
"""Exit codes: the program raised, had no memory left, did what is forbidden; there is no way to forbid it."""
DONE_MARK = "\0done:"
MAX_FILE_BYTES = 16 << 20
MAX_OPEN_FILES = 64

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_DUMPABLE = 38, 22, 4
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x10000

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in `_FORBIDDEN`, and the number by which seccomp knows the machine."""
_FORBIDDEN = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "quotactl": (179, 60),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_CLONE, _CLONE3, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (234, 131), (302, 261)
_READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")


class NoSandboxError(Exception):
    """This machine cannot forbid what must be forbidden."""


def restrict(folder: str, seconds: float, memory_bytes: int) -> None:
    """Forbids this process, for good, what the module's text says. Raises `NoSandboxError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _allow_files(libc, folder)
    _drop_capabilities(libc)
    _check(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "no dumps")
    _forbid_calls(libc)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise NoSandboxError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _allow_files(libc: ctypes.CDLL, folder: str) -> None:
    """Landlock (Linux 5.13): forbids every file but those that are named here."""
    abi = _check(libc.syscall(444, None, ctypes.c_size_t(0), 1), "Landlock, Linux 5.13 or later")
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    # Of files, TCP ports, and (to others outside) abstract sockets and signals.
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


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Root without them is a user who owns root's files."""
    _check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capabilities")


def _forbid_calls(libc: ctypes.CDLL) -> None:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise NoSandboxError(f"seccomp: no table of system calls for {machine}")
    column, number = _MACHINES[machine]
    program = b"".join(struct.pack("=HBBI", *each) for each in _filter(column, number))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check(libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def _filter(column: int, machine: int) -> Iterator[tuple[int, int, int, int]]:
    """Instructions (code, jump if true, jump if false, value) of a classic BPF program over a system call."""
    load, equals, has_bits, at_least, give = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, kill, no, unknown = 0x7FFF0000, 0x80000000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS
    first_argument = 16
    yield load, 0, 0, 4
    yield equals, 1, 0, machine
    yield give, 0, 0, kill
    yield load, 0, 0, 0
    # The x32 calls of x86_64 have other numbers.
    yield at_least, 0, 1, 0x40000000
    yield give, 0, 0, kill
    yield equals, 0, 1, _CLONE3[column]
    yield give, 0, 0, unknown  # threads are made by clone then
    for call in _FORBIDDEN.values():
        if call[column] is not None:
            yield equals, 0, 1, int(call[column] or 0)
            yield give, 0, 0, no
    for call, test, value in (
        (_CLONE[column], has_bits, _CLONE_THREAD),
        (_TGKILL[column], equals, os.getpid()),
        (_PRLIMIT[column], equals, 0),
    ):
        yield equals, 0, 4, call
        yield load, 0, 0, first_argument
        yield test, 1, 0, value
        yield give, 0, 0, no
        yield give, 0, 0, allow
    yield give, 0, 0, allow


def main(arguments: list[str]) -> NoReturn:
    """Never returns."""
    path, folder, done, seconds, memory_bytes = arguments
    with open(path, encoding="utf-8") as file:
        text = file.read()
    os.chdir(folder)
    try:
        restrict(folder, float(seconds), int(memory_bytes))
    except (NoSandboxError, OSError) as error:
        _end(NO_SANDBOX, str(error))
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(text, "program.py", "exec"), names)
    except SystemExit as error:
        if error.code not in (None, 0):
            _end(ERROR, f"the program ended with code {error.code}")
    except MemoryError:
        _end(MEMORY, "MemoryError")
    except BaseException as error:  # noqa: BLE001 - process boundary: the program can raise anything
        is_blocked = isinstance(error, OSError) and error.errno in (1, 13)
        _end(BLOCKED if is_blocked else ERROR, "".join(traceback.format_exception_only(error)))
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        _end(ERROR, f"standard output: {error}")
    _end(0, DONE_MARK + os.read(int(done), 64).decode())


def _end(code: int, text: str) -> NoReturn:
    try:
        os.write(2, text.encode(errors="replace")[-4096:])
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
