"""System calls that a restricted process may not make, as a program for seccomp. Runs in the sandbox."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from typing import NamedTuple

EPERM, ENOSYS = 1, 38

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables of calls, and the number by which seccomp knows the machine."""
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
    "setpgid": (109, 154),
    "setsid": (112, 157),
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
_CLONE3 = 435
_FCNTL = (72, 25)
_F_SETFL, _O_ASYNC = 4, 0x2000
_FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)
"""Allowed commands: copies and flags of descriptors, locks, sizes of pipes. F_SETOWN, F_SETSIG, F_SETLEASE and F_NOTIFY
are not: they send signals, before Linux 6.12, whose Landlock forbids it, to any process of the user."""

_ALLOW, _KILL, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050000 | EPERM, 0x00050000 | ENOSYS
_LOAD, _EQUALS, _HAS_BITS, _AT_LEAST, _GIVE = 0x20, 0x15, 0x45, 0x35, 0x06
_ARCHITECTURE_OFFSET, _CALL_OFFSET, _FIRST_ARGUMENT_OFFSET, _ARGUMENT_BYTES = 4, 0, 16, 8

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, value."""


class _ByArgument(NamedTuple):
    """A call that one of its arguments decides about."""

    call: tuple[int, int]
    argument: int
    test: int
    values: tuple[int, ...]
    allow: bool
    """True: only calls that pass the test with one of the values are allowed. False: only those are refused."""


def _by_argument() -> tuple[_ByArgument, ...]:
    clone_thread, set_parent_death_signal = 0x10000, 1
    set_async, set_owner, set_group = 0x5452, 0x8901, 0x8902
    return (
        _ByArgument((56, 220), 0, _HAS_BITS, (clone_thread,), allow=True),  # clone: threads, no processes
        _ByArgument((234, 131), 0, _EQUALS, (os.getpid(),), allow=True),  # tgkill: its own threads
        _ByArgument((302, 261), 0, _EQUALS, (0,), allow=True),  # prlimit64: its own limits
        # prctl: the program dies with the process of its tests.
        _ByArgument((157, 167), 0, _EQUALS, (set_parent_death_signal,), allow=False),
        # ioctl: signals, as by fcntl.
        _ByArgument((16, 29), 1, _EQUALS, (set_async, set_owner, set_group), allow=False),
    )


def forbid_calls(libc: ctypes.CDLL) -> str:
    """Forbids this process and its threads the calls, for good. Returns a problem, empty if there is none."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return f"no table of system calls for {machine}"
    column, number = _MACHINES[machine]
    program = b"".join(struct.pack("=HBBI", *each) for each in _filter(column, number))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    set_seccomp, mode_filter = 22, 2
    if libc.prctl(set_seccomp, mode_filter, header, 0, 0) < 0:
        return os.strerror(ctypes.get_errno())
    return ""


def _filter(column: int, machine: int) -> Iterator[_Instruction]:
    """Yields the instructions of a classic BPF program over a system call."""
    yield _LOAD, 0, 0, _ARCHITECTURE_OFFSET
    yield _EQUALS, 1, 0, machine
    yield _GIVE, 0, 0, _KILL
    yield _LOAD, 0, 0, _CALL_OFFSET
    # The x32 calls of x86_64 have other numbers.
    yield _AT_LEAST, 0, 1, 0x40000000
    yield _GIVE, 0, 0, _KILL
    yield _EQUALS, 0, 1, _CLONE3
    yield _GIVE, 0, 0, _UNKNOWN  # libraries make threads by clone then
    for numbers in _FORBIDDEN.values():
        if (call := numbers[column]) is not None:
            yield _EQUALS, 0, 1, call
            yield _GIVE, 0, 0, _REFUSE
    for rule in _by_argument():
        yield from _decided_by_argument(rule, column)
    yield from _fcntl(column)
    yield _GIVE, 0, 0, _ALLOW


def _decided_by_argument(rule: _ByArgument, column: int) -> Iterator[_Instruction]:
    num_values = len(rule.values)
    yield _EQUALS, 0, num_values + 3, rule.call[column]
    yield _load(rule.argument)
    for index, value in enumerate(rule.values):
        yield rule.test, num_values - index, 0, value
    yield _GIVE, 0, 0, _REFUSE if rule.allow else _ALLOW
    yield _GIVE, 0, 0, _ALLOW if rule.allow else _REFUSE


def _fcntl(column: int) -> Iterator[_Instruction]:
    num_commands = len(_FCNTL_COMMANDS)
    yield _EQUALS, 0, num_commands + 8, _FCNTL[column]
    yield _load(1)
    yield _EQUALS, num_commands + 2, 0, _F_SETFL
    for index, command in enumerate(_FCNTL_COMMANDS):
        yield _EQUALS, num_commands - index, 0, command
    yield _GIVE, 0, 0, _REFUSE
    yield _GIVE, 0, 0, _ALLOW
    yield _load(2)
    yield _HAS_BITS, 1, 0, _O_ASYNC
    yield _GIVE, 0, 0, _ALLOW
    yield _GIVE, 0, 0, _REFUSE


def _load(argument: int) -> _Instruction:
    """Loads the lower half of an argument, all that the kernel looks at here."""
    return _LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET + _ARGUMENT_BYTES * argument
