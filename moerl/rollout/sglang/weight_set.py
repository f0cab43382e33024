"""A whole set of weights, kept tensor by tensor while it is sent. Runs where the engine's client runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

import torch
from torch import Tensor

from moerl.errors import WeightSyncError

_REMEDY = "send the whole checkpoint of the served model once"


class WeightSet:
    """One update in the making, on the CPU.

    shapes: of every tensor of the served model, by its name in the checkpoint.
    tied: names that may come as well, each with the tensor that it must equal; they are not kept.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> None:
        self._shapes, self._tied = shapes, tied
        self._tensors: dict[str, Tensor] | None = None
        self._version = -1

    def begin(self, version: int) -> None:
        """Starts a set; one that was never taken is forgotten."""
        if version < 0:
            raise WeightSyncError(
                "weight update: policy version", seen=version, expected="at least 0", remedy="count updates from 0"
            )
        self._tensors, self._version = {}, version

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Keeps a copy of each tensor, and returns those that the server needs: not the tied ones.

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
            staged[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            if owner is None:
                needed.append((name, tensor.detach()))
        return needed

    @property
    def version(self) -> int:
        """Of the set that was begun last; -1 before the first."""
        return self._version

    def part(self, version: int) -> dict[str, Tensor]:
        """The tensors that have come, of a set that other senders have the rest of; the set is closed.

        Raises:
            WeightSyncError: none is open, or one of another version.
        """
        staged = self._open()
        if version != self._version:
            raise WeightSyncError("weight update: a part", seen=f"version {self._version}", expected=version)
        self._tensors = None
        return staged

    def take(self, elsewhere: Collection[str] = ()) -> tuple[int, dict[str, Tensor]]:
        """The version and its tensors by name, in the order of the checkpoint; the set is closed.

        Args:
            elsewhere: names that are not kept here: senders have sent those tensors.

        Raises:
            WeightSyncError: a tensor is missing, was sent twice, or a tied one is another than the one it is tied to.
        """
        staged = self._open()
        self._require_whole(staged.keys() - self._tied.keys(), set(elsewhere))
        for name, owner in self._tied.items():
            if name in staged and (owner in elsewhere or not torch.equal(staged[name], staged[owner])):
                raise WeightSyncError(
                    f"weight update: tensor {name!r}", seen="other values", expected=f"those of {owner!r}, its tied one"
                )
        self._tensors = None
        return self._version, {name: staged[name] for name in self._shapes if name in staged}

    def _require_whole(self, here: Set[str], elsewhere: Set[str]) -> None:
        missing, twice = sorted(self._shapes.keys() - here - elsewhere), sorted(here & elsewhere)
        if missing:
            raise WeightSyncError(
                "weight update: tensors are missing",
                seen=f"{len(missing)} missing, the first is {missing[0]!r}",
                expected=f"all {len(self._shapes)} tensors",
                remedy=_REMEDY,
            )
        if twice:
            raise WeightSyncError(
                "weight update: tensors of two senders",
                seen=f"{len(twice)}, the first is {twice[0]!r}",
                expected="each tensor once",
                remedy=_REMEDY,
            )

    def _open(self) -> dict[str, Tensor]:
        if self._tensors is None:
            raise WeightSyncError("weight update: none is open", remedy="call begin_update first")
        return self._tensors
