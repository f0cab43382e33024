"""Process groups whose collectives go through host memory, so that ranks can share a GPU: for checks and tests alone.

NCCL refuses two ranks on one device, and gloo sends nothing from a GPU. Here a collective copies its tensors to the
host, is done there by gloo, and its results are copied back by whoever waits for it. `load` makes the groups of this
process such ones; call it before `moerl.trainer.groups.start`. As NCCL, they take tensors of one kind of device only:
of the GPU if there is one, which the ranks of a node share, else of the host, with gloo's digits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "staged"
_TRANSFERS = ("send", "recv", "recv_anysource")
_COLLECTIVES = (
    *("broadcast", "reduce", "allreduce", "allreduce_coalesced", "gather", "scatter", "alltoall", "barrier"),
    *("allgather", "allgather_coalesced", "reduce_scatter", *_TRANSFERS),
    # Each of these has two names: torch 2.13 calls the second.
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)


def load() -> None:
    """Registers the backend, and makes it the one of this process's groups."""
    from moerl.trainer import platform

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.Backend.register_backend(NAME, functools.partial(_make, device_type), devices=[device_type])
    platform.collective_backend = lambda: NAME


def _make(device_type: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    inner: Any = dist.ProcessGroup(store, rank, size)
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group: Any = StagedGroup(inner, device_type)
    # torch sends objects in tensors of the device that a group is registered for.
    group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.CUSTOM, gloo)
    return group


class _Work(dist.Work):
    """A collective on the host. results: pairs of a tensor and its copy there, which `wait` brings back."""

    def __init__(self, inner: Any, results: list[tuple[Tensor, Tensor]], kept: Any, divisor: int) -> None:
        super().__init__()
        self._inner, self._results, self._kept, self._divisor = inner, results, kept, divisor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._finish(timeout)
        with torch.no_grad():
            for tensor, host in self._results:
                tensor.copy_(host / self._divisor if self._divisor > 1 else host)
        self._results, self._kept = [], None
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def _finish(self, timeout: timedelta) -> None:
        self._inner.wait(timeout)


class _Transfer(_Work):
    """A send or a receive. gloo's are not done before somebody waits; for one who polls, a thread does."""

    _end: Future[None] | None = None

    def is_completed(self) -> bool:
        if self._end is None:
            self._end = Future()
            # A peer that never comes must not keep the process from ending.
            threading.Thread(target=_wait, args=(self._inner, timedelta(0), self._end), daemon=True).start()
        return self._end.done()

    def _finish(self, timeout: timedelta) -> None:
        if self._end is None:
            self._end = Future()
            _wait(self._inner, timeout, self._end)
        # As for gloo, 0 is no limit.
        self._end.result(timeout.total_seconds() or None)


def _wait(inner: Any, timeout: timedelta, end: Future[None]) -> None:
    """Waits for gloo, once: a second wait would be for the next transfer. `end` gets the error of a failed one."""
    try:
        inner.wait(timeout)
    except Exception as error:  # noqa: BLE001 - raised by whoever asks for the result
        end.set_exception(error)
    else:
        end.set_result(None)


class StagedGroup(dist.ProcessGroup):
    """A group of ranks with tensors on devices of one type. inner: the same ranks' group of gloo."""

    def __init__(self, inner: Any, device_type: str) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        self._inner, self._device_type = inner, device_type

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def staged(self, name: str, args: Any, kwargs: Any) -> _Work:
        """Starts gloo's collective over copies on the host; the first argument is what it writes."""
        hosted = tree_map_only(Tensor, self._to_host, args)
        divisor = _sum_for_mean(args, self.size())
        work = getattr(self._inner, name)(*hosted, **kwargs)
        written = args[:1] if name not in ("send", "barrier") else ()
        results = zip(_tensors(written), _tensors(hosted[: len(written)]), strict=True)
        kind = _Transfer if name in _TRANSFERS else _Work
        return kind(work, list(results), hosted, divisor)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != self._device_type:
            raise RuntimeError(f"a tensor on {tensor.device} in a group of devices of type {self._device_type}")
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def allgather(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, outputs: Any, inputs: Any, *options: Any
    ) -> _Work:
        """Gathers the parts of all ranks; parts may differ in size, as with NCCL."""
        (parts,), (mine,) = outputs, inputs
        longest = max(part.numel() for part in parts)
        if all(part.numel() == longest for part in parts):
            return self.staged("allgather", (outputs, inputs, *options), {})
        padded, gathered = mine.new_zeros(longest), [mine.new_empty(longest) for _ in parts]
        padded[: mine.numel()] = mine.detach().flatten()
        work = self.staged("allgather", ([gathered], [padded], *options), {})
        work.wait()
        return self._done(
            parts, [each[: part.numel()].view_as(part) for each, part in zip(gathered, parts, strict=True)]
        )

    def reduce_scatter(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, outputs: Any, inputs: Any, options: Any
    ) -> _Work:
        """Sums the parts over all ranks and gives each rank its own; parts may differ in size, as with NCCL."""
        (parts,) = inputs
        if len({part.numel() for part in parts}) == 1:
            return self.staged("reduce_scatter", (outputs, inputs, options), {})
        sums = [part.detach().clone() for part in parts]
        for each in sums:
            reduce = dist.AllreduceOptions()
            reduce.reduceOp = options.reduceOp
            self.staged("allreduce", ([each], reduce), {}).wait()
        return self._done(outputs, [sums[self.rank()]])

    def _done(self, outputs: Any, results: list[Tensor]) -> _Work:
        work = self.staged("barrier", (), {})
        with torch.no_grad():
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
        return work


def _sum_for_mean(args: Any, size: int) -> int:
    """gloo has no mean: asks for the sum instead, and returns what it is to be divided by."""
    for options in args:
        if getattr(options, "reduceOp", None) == dist.ReduceOp.AVG:
            options.reduceOp = dist.ReduceOp.SUM
            return size
    return 1


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _method(name: str) -> Callable[..., _Work]:
    return lambda self, *args, **kwargs: self.staged(name, args, kwargs)


for _name in _COLLECTIVES:
    if _name not in vars(StagedGroup):
        setattr(StagedGroup, _name, _method(_name))
