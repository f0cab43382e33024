"""A device that exists in tests alone: mixes of host and device tensors are refused, synchronisations are counted.

On a CPU every tensor is in host memory, so no test sees a tensor that was left there, a `.numpy()` of one that will
be on a GPU, or a wait for the device. In here some tensors are *on the device*: those made with, or moved to,
`DEVICE`, and what is computed from them. They are CPU tensors to torch, whose `.device` says `DEVICE` (``cpu:0``; the
host is ``cpu``). In a rank (`tests/ranks.py`), around everything that makes tensors:

    with pretended_device() as seen:
        trainer = tiny_moe.build(layout, path)
        seen.clear()
        trainer.step(batches, loss, enforce=True)
    assert seen.of("moerl.trainer.replay") == []     # a list of `Synchronisation`
    print(seen.table(), seen.num_operations)

Refused with `MixedDevicesError`: operations over tensors of both places (a host scalar of no dimension may join in),
collectives of host tensors in groups that would be NCCL's, `.numpy()` of device tensors, a model left on the host.
Counted: reads of a value (``item``, ``bool``, ``float``, ``tolist``), operations whose result's size depends on values
(``nonzero``, ``unique``, boolean indexing, ...), blocking copies in either direction, waits for streams and events.
A copy to the device does not block if its source is pinned and it is ``non_blocking``; one to the host if it is
``non_blocking``. `torch.cuda.is_available()` stays False, so what only a GPU runs is not seen; modules that stand in
for a GPU's kernels on a CPU (`STAND_INS`) are left alone, and what they make is on the device.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")

STAND_INS = (
    "moerl.kernels.host",
    "moerl.kernels.pairs",
    "moerl.kernels.routing",
    "moerl.trainer.attention",
    "moerl.trainer.experts",
    "moerl.trainer.norm",
    "moerl.trainer.platform",
    "moerl.trainer.uneven",
)
"""Modules that run on a CPU in place of a GPU's kernels."""

_WAITS = {
    name: f"aten.{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
} | {"equal": "aten.equal", "bincount": "aten.bincount"}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_COPIES = ("copy_", "_to_copy")
_FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "alias")


class MixedDevicesError(RuntimeError):
    """Error of an operation that a GPU would refuse."""


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """A wait of the host for the device. kind: operation. module, line: the innermost caller that is not torch's."""

    kind: str
    module: str
    line: int


class Seen:
    """Events since the start, or since `clear`. num_operations: operations on the device, without views, allocations
    and those of stand-ins: about as many launches."""

    def __init__(self) -> None:
        self.synchronisations: list[Synchronisation] = []
        self.num_operations = 0

    def clear(self) -> None:
        self.synchronisations, self.num_operations = [], 0

    def of(self, *modules: str) -> list[Synchronisation]:
        """Returns the synchronisations of modules whose names begin with one of these."""
        return [each for each in self.synchronisations if each.module.startswith(modules)]

    def table(self) -> str:
        """A line for each place, the most frequent first."""
        counts = Counter(self.synchronisations).most_common()
        return "\n".join(f"{count:6} {each.kind} in {each.module}:{each.line}" for each, count in counts)

    def wait(self, kind: str) -> None:
        """Notes a synchronisation at the caller."""
        frame = _innermost()
        self.synchronisations.append(Synchronisation(kind, frame.f_globals.get("__name__", "?"), frame.f_lineno))


@contextlib.contextmanager
def pretended_device() -> Iterator[Seen]:
    """Runs the trainer's code of a CPU on the device of this module. One thread; not to be nested."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from moerl.trainer import platform

    seen, tensor = Seen(), torch.Tensor
    mode = _Mode(seen)
    originals = {name: getattr(tensor, name) for name in ("device", "to", "numpy", "__array__", "tolist")}
    cuda: Any = torch.cuda

    def on_host(name: str) -> Callable[..., Any]:
        def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self in mode.device and not _stands_in():
                raise MixedDevicesError(f"{name}() of a tensor {tuple(self.shape)} on the device")
            return originals[name](self, *args, **kwargs)

        return refuse

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return mode.move(originals["to"], self, args, kwargs)

    def tolist(self: Tensor) -> Any:
        if self in mode.device and not _stands_in():
            seen.wait("tolist")
        return originals["tolist"](self)

    def made(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            # Data on its way into a tensor is not seen by a dispatch mode.
            device = kwargs.pop("device", None)
            out = factory(*args, **kwargs)
            return out if device is None else out.to(device)

        return make

    def place(self: Tensor) -> torch.device:
        # A sharded tensor of torch's checkpoints looks for the property that this function replaces.
        shards = self.__dict__.get("_local_shards")
        return (
            shards[0].tensor.device if shards else DEVICE if self in mode.device else originals["device"].__get__(self)
        )

    changed: list[tuple[Any, str, Any]] = [
        (tensor, "device", property(place)),
        (tensor, "to", to),
        (tensor, "cpu", lambda self: to(self, HOST)),
        (tensor, "cuda", lambda self, *args, **kwargs: to(self, DEVICE, **kwargs)),
        *((tensor, name, on_host(name)) for name in ("numpy", "__array__")),
        (tensor, "tolist", tolist),
        (tensor, "pin_memory", lambda self: mode.pin(self.clone())),
        (tensor, "is_pinned", lambda self: self in mode.pinned),
        (torch, "tensor", made(torch.tensor)),
        (torch, "as_tensor", made(torch.as_tensor)),
        (platform, "CPU", DEVICE),
        # Kept from one step to the next, where the first one made it.
        (MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
        (dist, "new_group", mode.new_group(dist.new_group)),
        (
            dist.distributed_c10d,
            "_get_object_coll_device",
            lambda group=None: HOST if mode.is_for_hosts(group) else DEVICE,
        ),
        (cuda, "synchronize", lambda *args, **kwargs: seen.wait("torch.cuda.synchronize")),
        (cuda.Stream, "synchronize", lambda self: seen.wait("synchronize of a stream or event")),
    ]
    stand_in = sys.modules["megatron.core.utils"].__dict__["torch"]
    if stand_in is not torch:
        changed.append((stand_in, "tensor", made(stand_in.tensor)))
    with contextlib.ExitStack() as stack:
        for owner, name, value in changed:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mode)
        yield seen


class _Storages:
    """A set of tensors by their memory, views included; memory that is gone leaves it."""

    def __init__(self) -> None:
        # A weak reference keeps the address from being used again.
        self._known: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        # A tensor of another class is made of such ones.
        return type(tensor) in (Tensor, nn.Parameter) and tensor.untyped_storage()._cdata in self._known

    def add(self, tensor: Tensor) -> None:
        if len(self._known) % 4096 == 4095:
            self._known = {key: each for key, each in self._known.items() if not each.expired()}
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)

    def remove(self, tensor: Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)


class _Mode(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen, self.device, self.pinned = seen, _Storages(), _Storages()
        self._host_groups: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.get("pin_memory") is True
        if is_pinned:
            kwargs["pin_memory"] = False
        given = _tensors((args, kwargs))
        name, here = func.overloadpacket.__name__, [each in self.device for each in given]
        stands_in = _stands_in()
        if not stands_in:
            self._look(func, name, args, kwargs, given)
        before = {each.untyped_storage()._cdata for each in given}
        result = func(*args, **kwargs)
        # What the engine of gradients makes of no tensor lies where the gradients do.
        on_device = any(here) or kwargs.get("device") == DEVICE or (not given and _is_engine())
        for each in _tensors(result):
            is_new = each.untyped_storage()._cdata not in before
            if stands_in or (on_device and is_new):
                self.device.add(each)
            if is_pinned and is_new:
                self.pinned.add(each)
        if on_device and not (stands_in or func.is_view or name in _FREE):
            self.seen.num_operations += 1
        return result

    def _look(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        """Refuses what mixes places; counts what waits."""
        here = [each in self.device for each in given]
        if func.namespace == "c10d":
            if not all(here) and name != "barrier" and not any(map(self.is_for_hosts, _groups(args))):
                raise MixedDevicesError(f"{func} of tensors on the host in a group of the device")
            return
        if not any(here):
            return
        if name == "copy_":
            self._look_at_copy(args[0], args[1], bool(kwargs.get("non_blocking", args[2:3] == (True,))))
        elif name in _INDEXING:
            self._look_at_indices(args)
        elif name not in _COPIES and any(not at and each.dim() for at, each in zip(here, given, strict=True)):
            where = ", ".join(
                f"{tuple(x.shape)} on the {'device' if at else 'host'}" for x, at in zip(given, here, strict=True)
            )
            raise MixedDevicesError(f"{func} of {where}")
        if name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.seen.wait(_WAITS.get(name, "repeat_interleave without output_size"))

    def _look_at_copy(self, into: Tensor, source: Tensor, non_blocking: bool) -> None:
        if source not in self.device and source.dim() and not (non_blocking and source in self.pinned):
            self.seen.wait("copy to the device")
        elif into not in self.device and not (non_blocking and into in self.pinned):
            self.seen.wait("copy to the host")

    def _look_at_indices(self, args: Any) -> None:
        indices = [each for each in args[1] if each is not None]
        others = [args[0], *(each for each in args[2:3] if isinstance(each, Tensor) and each.dim())]
        if not all(each in self.device for each in others):
            raise MixedDevicesError("indexing of a tensor on the host with, or for, one on the device")
        # A mask that sets a number becomes a fill.
        is_fill = len(args) > 2 and args[2].numel() == 1 and args[2] not in self.device
        if any(each not in self.device for each in indices):
            self.seen.wait("index on the host")
        elif any(each.dtype in (torch.bool, torch.uint8) for each in indices) and not is_fill:
            self.seen.wait("boolean index")

    def move(self, move: Callable[..., Tensor], tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        """`Tensor.to`, for which both places are the same memory."""
        target, args, kwargs = _target(args, kwargs)
        is_here = tensor in self.device
        if target is None or (target == DEVICE) == is_here:
            return move(tensor, *args, **kwargs) if args or kwargs else tensor
        non_blocking = kwargs.get("non_blocking", False)
        if not _stands_in() and not (non_blocking and (is_here or tensor in self.pinned)):
            self.seen.wait("copy to the host" if is_here else "copy to the device")
        out = move(tensor, *args, **(kwargs | {"copy": True}))
        (self.device.remove if is_here else self.device.add)(out)
        return out

    def new_group(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`dist.new_group`, which notes groups of gloo: those that it makes for any other reason would be NCCL's."""

        def made(*args: Any, **kwargs: Any) -> Any:
            group = make(*args, **kwargs)
            if kwargs.get("backend") == "gloo":
                self._host_groups.add(group.group_name)
            return group

        return made

    def is_for_hosts(self, group: Any) -> bool:
        """A group for host tensors, made by our code or, before, by Megatron."""
        return group is not None and (group.group_name in self._host_groups or "GLOO" in group.group_desc)

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor)
        return tensor


def _tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors with memory of their own: a sparse tensor is made of others."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.layout == torch.strided]


def _target(args: Any, kwargs: Any) -> tuple[torch.device | None, Any, Any]:
    """Returns the device that `Tensor.to` moves to, or None if the tensor stays, and the other arguments."""
    kwargs = dict(kwargs)
    first = args[0] if args else kwargs.pop("device", kwargs.pop("other", None))
    if isinstance(first, Tensor):
        return first.device, args[1:], kwargs | {"dtype": first.dtype}
    if first is None or isinstance(first, torch.dtype):
        return None, args, kwargs
    named = dict(zip(("dtype", "non_blocking", "copy"), args[1:], strict=False))
    return HOST if torch.device(first) == HOST else DEVICE, (), kwargs | named


def _groups(args: Any) -> list[Any]:
    boxed = (each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()))
    return [dist.ProcessGroup.unbox(each) for each in boxed]


def _callers() -> Iterator[Any]:
    """Frames around this module, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _module(frame) != __name__:
            yield frame
        frame = frame.f_back


def _module(frame: Any) -> str:
    return frame.f_globals.get("__name__", "")


def _stands_in() -> bool:
    ours = (name for name in map(_module, _callers()) if name.startswith("moerl."))
    return next(ours, "") in STAND_INS


def _is_engine() -> bool:
    names = (name for name in map(_module, _callers()) if not name.startswith(("torch._compile", "torch._dynamo")))
    return next(names, "") == "torch.autograd.graph"


def _innermost() -> Any:
    return next(frame for frame in _callers() if not _module(frame).startswith("torch."))
