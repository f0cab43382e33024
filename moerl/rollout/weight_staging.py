"""Staging of a weight update: Hugging Face checkpoint names in, a whole new set of parameters or nothing out.

Runs inside the embedded rollout engine. Checkpoints hold one tensor per expert and projection
(`...mlp.experts.3.gate_proj.weight`); transformers 5 modules hold them fused (`...mlp.experts.gate_up_proj`
[E, 2F, H] with gate rows first, `...mlp.experts.down_proj` [E, H, F]). Tensors are cast to the dtype of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moerl.contract.weight_update import REMEDY, Arrivals, WeightUpdate, check_update
from moerl.errors import WeightSyncError

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


def checkpoint_views(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns views of one module tensor under the names it has in a checkpoint; fused experts become one view each."""
    if name.endswith(_GATE_UP):
        prefix, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
        gate = {f"{prefix}{e}.gate_proj.weight": tensor[e, :half] for e in range(tensor.shape[0])}
        up = {f"{prefix}{e}.up_proj.weight": tensor[e, half:] for e in range(tensor.shape[0])}
        return gate | up
    if name.endswith(_DOWN):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{e}.down_proj.weight": tensor[e] for e in range(tensor.shape[0])}
    return {name: tensor}


def held_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor of a model, by the model's own names."""
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def held_tensors(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor that a model has, once, by the names that a checkpoint has for it.

    Args:
        dtypes: what they are yielded in, by the model's own names. Their numbers are of that type already.
    """
    tied = _tied_names(model)
    for name, tensor in model.state_dict().items():
        if name not in tied:
            yield from checkpoint_views(name, tensor.to(dtypes[name])).items()


class WeightStaging:
    """One update in the making: a second copy of the tensors that it brings, filled name by name.

    Args:
        model: whose tensors are wanted; it is not touched before `commit`.
        update: its kind says which of them must come.
        dtypes: what tensors are rounded to, by the model's own names; the model may compute in a wider type.

    Raises:
        WeightSyncError: its list is not for the tensors of this model.
    """

    def __init__(self, model: nn.Module, update: WeightUpdate, dtypes: Mapping[str, torch.dtype]) -> None:
        self._arrivals = Arrivals(update)
        self._tied = _tied_names(model)
        self._live = {n: t for n, t in model.state_dict().items() if n not in self._tied}
        self._staged: dict[str, Tensor] = {}
        self._places: dict[str, Tensor] = {}
        held: dict[str, tuple[int, ...]] = {}
        brought = {self._tied.get(name, name) for name in update.tensors}
        for name, tensor in self._live.items():
            staged = torch.empty_like(tensor, dtype=dtypes[name])
            places = checkpoint_views(name, staged)
            held |= {place: tuple(view.shape) for place, view in places.items()}
            if brought.isdisjoint(places):
                continue
            if not brought.issuperset(places):
                staged.copy_(tensor)
            self._staged[name] = staged
            self._places |= places
        check_update(update, held, self._tied)
        self._tied_received: dict[str, Tensor] = {}

    @property
    def version(self) -> int:
        """Policy version of the new weights."""
        return self._arrivals.update.version

    @torch.no_grad()
    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copies tensors into the staged set. Raises as `Arrivals.check`; `commit` then raises the same."""
        for name, tensor in tensors:
            self._arrivals.check(name, tensor.shape)
            if name in self._tied:
                self._tied_received[name] = tensor.detach().to(self._places[self._tied[name]], copy=True)
            else:
                self._places[name].copy_(tensor)
            self._arrivals.names.add(name)

    @torch.no_grad()
    def commit(self) -> None:
        """Copies the staged set into the model.

        Raises:
            WeightSyncError: the update is not whole, or a tied tensor is not the one it is tied to; the model is as it
                was.
        """
        self._arrivals.require_whole()
        for name, tensor in self._tied_received.items():
            if not torch.equal(tensor, self._places[self._tied[name]]):
                raise WeightSyncError(
                    f"weight update to version {self.version}: {name} differs from {self._tied[name]}",
                    seen="other values",
                    expected=f"equal values: this model ties {name} to it",
                    remedy=REMEDY,
                )
        for name, tensor in self._staged.items():
            self._live[name].copy_(tensor)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Returns names of tensors that share the parameter of an earlier name, and that name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied
