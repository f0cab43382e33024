"""The tensors of an update, or a sender's part of them, kept while they are sent. Runs in every sender."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from moerl.contract.weight_update import Arrivals, WeightUpdate, require_open
from moerl.errors import WeightSyncError


class WeightSet:
    """One update in the making, on the CPU.

    Args:
        tied: names that may come as well, each with the tensor that it must equal; they are not kept.
        keeps_copy: of every tensor; else of those alone that another one is compared with.
    """

    def __init__(self, tied: Mapping[str, str], *, keeps_copy: bool = True) -> None:
        self._tied, self._keeps_copy = tied, keeps_copy
        self._compared = {*tied, *tied.values()}
        self._tensors: dict[str, Tensor | None] = {}
        self._arrivals: Arrivals | None = None

    def begin(self, update: WeightUpdate) -> None:
        """Starts a set; one that was never taken is forgotten."""
        self._tensors, self._arrivals = {}, Arrivals(update)

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Checks each tensor and keeps a copy; returns those that the server needs: not the tied ones.

        Raises:
            WeightSyncError: no set is open, or as `Arrivals.check`.
        """
        arrivals, needed = require_open(self._arrivals), []
        for name, tensor in tensors:
            arrivals.check(name, tensor.shape)
            self._tensors[name] = None
            if self._keeps_copy or name in self._compared:
                copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                self._tensors[name] = copy
            arrivals.names.add(name)
            if name not in self._tied:
                needed.append((name, tensor.detach()))
        return needed

    def drop(self) -> None:
        """Forgets the open set."""
        self._tensors, self._arrivals = {}, None

    def part(self, version: int) -> tuple[Collection[str], dict[str, Tensor | None]]:
        """Closes the set; returns the names of the tensors that have come, and these in the order of the update's list,
        without tied ones. None stands for a tensor of which no copy is kept.

        Raises:
            WeightSyncError: none is open, or one of another version; `receive` has refused a tensor; or a tied tensor
                is not the one it is tied to.
        """
        arrivals, staged = require_open(self._arrivals), self._tensors
        update = arrivals.update
        if version != update.version:
            raise WeightSyncError("weight update: a part", seen=f"version {update.version}", expected=version)
        arrivals.require_good()
        for name, owner in self._tied.items():
            tensor, other = staged.get(name), staged.get(owner)
            if tensor is not None and other is not None and not torch.equal(tensor, other):
                raise WeightSyncError(
                    f"weight update: tensor {name!r}", seen="other values", expected=f"those of {owner!r}, its tied one"
                )
        self.drop()
        return arrivals.names, {n: staged[n] for n in update.tensors if n in staged and n not in self._tied}
