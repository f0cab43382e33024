"""One gloo device for all process groups of a rank. Runs in every trainer rank.

torch gives each gloo group a device of its own, with a thread that wakes up 100 times a second even if nothing is sent.
Megatron makes some 25 groups of a rank, so that an idle rank used 3% of a core.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextlib.contextmanager
def shared_device() -> Iterator[None]:
    """Has the gloo groups that are made in its body share the device of the first of them."""
    original = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _OneDevice(original)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


class _OneDevice:
    """Stands in for the class `ProcessGroupGloo`, as a function and as an argument of `isinstance`."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._options: Any = None

    def __call__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        if self._options is None:
            first = self._original(store, rank, size, timeout=timeout)
            self._options = first.options
            return first
        options = self._original._Options()
        options._devices, options._threads, options._timeout = self._options._devices, self._options._threads, timeout
        return self._original(store, rank, size, options)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._original)
