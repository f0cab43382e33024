"""Memory of a process that frees and asks for the same large blocks again, step by step. Standard library alone."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's `mallopt`."""

_MIB = 1 << 20
_SETTINGS = {_MMAP_THRESHOLD: 1024 * _MIB, _TRIM_THRESHOLD: 512 * _MIB, _TOP_PAD: 64 * _MIB}


def keep_freed_memory() -> bool:
    """Lets malloc keep up to 512 MiB of freed memory. By default malloc gives blocks of some MiB back to the system at
    once, and the next step pays for every page again: a tenth of a step of small models on a CPU.

    Returns:
        True if malloc has the settings now; False if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) for name, value in _SETTINGS.items())
