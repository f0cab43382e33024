"""A set of weights, or a sender's part of one, kept tensor by tensor while it is sent. Runs in every sender."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from moerl.contract.ports import check_version
from moerl.errors import WeightSyncError

_REMEDY = "send the whole checkpoint of the served model once"


class WeightSet:
    """One update in the making, on the CPU.

    Args:
        shapes: of every tensor of the served model, by its name in the checkpoint.
        tied: names that may come as well, each with the tensor that it must equal; they are not kept.
        keeps_copy: of every tensor; else of those alone that another one is compared with.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str], *, keeps_copy: bool = True
    ) -> None:
        self._shapes, self._tied, self._keeps_copy = shapes, tied, keeps_copy
        self._compared = {*tied, *tied.values()}
        self._tensors: dict[str, Tensor | None] | None = None
        self._version = -1

    def begin(self, version: int) -> None:
        """Starts a set; one that was never taken is forgotten."""
        check_version(version)
        self._tensors, self._version = {}, version

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Checks each tensor and keeps a copy; returns those that the server needs: not the tied ones.

        Raises:
            WeightSyncError: no set is open, a name is unknown or came before, or a shape is another.
        """
        staged, needed = self._open(), []
        for name, tensor in tensors:
            owner = self._tied.get(name)
            expected = self._shapes.get(owner or name)
            if expected != tuple(tensor.shape) or name in staged:
                raise WeightSyncError(
                    f"weight update: tensor {name!r}",
                    seen="a second time" if name in staged else f"shape {tuple(tensor.shape)}",
                    expected="once" if name in staged else (expected or "a name that the served model has"),
                    remedy=_REMEDY,
                )
            staged[name] = _copy(tensor) if self._keeps_copy or name in self._compared else None
            if owner is None:
                needed.append((name, tensor.detach()))
        return needed

    def drop(self) -> None:
        """Forgets the open set."""
        self._tensors = None

    def part(self, version: int) -> dict[str, Tensor | None]:
        """Closes the set; returns the tensors that have come, in the order of the checkpoint, without tied ones. None
        stands for a tensor of which no copy is kept.

        Raises:
            WeightSyncError: none is open, or one of another version; or a tied tensor is not the one it is tied to.
        """
        staged = self._open()
        if version != self._version:
            raise WeightSyncError("weight update: a part", seen=f"version {self._version}", expected=version)
        for name, owner in self._tied.items():
            tensor, other = staged.get(name), staged.get(owner)
            if tensor is not None and other is not None and not torch.equal(tensor, other):
                raise WeightSyncError(
                    f"weight update: tensor {name!r}", seen="other values", expected=f"those of {owner!r}, its tied one"
                )
        self._tensors = None
        return {name: staged[name] for name in self._shapes if name in staged}

    def _open(self) -> dict[str, Tensor | None]:
        if self._tensors is None:
            raise WeightSyncError("weight update: none is open", remedy="call begin_update first")
        return self._tensors


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def check_whole(names: Collection[Collection[str]], shapes: Mapping[str, object]) -> None:
    """Raises WeightSyncError unless the parts of all senders, by their tensors' names, make up the model."""
    counts = Counter(name for part in names for name in part)
    missing, twice = sorted(shapes.keys() - counts.keys()), sorted(name for name, count in counts.items() if count > 1)
    if missing:
        raise WeightSyncError(
            "weight update: tensors are missing",
            seen=f"{len(missing)} missing, the first is {missing[0]!r}",
            expected=f"all {len(shapes)} tensors",
            remedy=_REMEDY,
        )
    if twice:
        raise WeightSyncError(
            "weight update: tensors of two senders",
            seen=f"{len(twice)}, the first is {twice[0]!r}",
            expected="each tensor once",
            remedy=_REMEDY,
        )
