"""Optimizer state in host memory. Runs in every trainer rank; on a CPU host and device are the same memory.

Master weights and Adam's moments of a share of the parameters lie in pinned host memory. An update fetches them piece
by piece into two slots on the device, updates them there with the same optimizer, writes the weights, and copies the
state back: the next piece arrives, and the one before leaves, while one is computed. Adam works element by element, so
the digits are those of a resident state.

Megatron's own offloading is not used (docs/decisions/optimizer-offload.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moerl.machine.memory import PIECE_ELEMENTS, PIECES
from moerl.trainer import platform
from moerl.trainer.rest import host_tensors
from moerl.trainer.sharded_state import make_moments

_ALIGNED = 64
"""Numbers; tensors begin at multiples of it in a slot."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_GROUPS = ("model_float16_groups", "shard_fp32_from_float16_groups", "model_fp32_groups", "shard_fp32_groups")
"""Lists of a distributed optimizer: parameters of the model, and the part of each that is updated here."""


@dataclass(slots=True, eq=False)
class _Offloaded:
    """One parameter of the optimizer with state in host memory.

    target: the tensor that the optimizer updates: a master weight, or a view of a float32 weight. model: the parameter
    of the model that a master weight is written to; None for a float32 weight, which is updated in place. homes:
    float32, in host memory, by name: the moments, and `master` if there is one.
    """

    target: Tensor
    model: Tensor | None
    homes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class OffloadedState:
    """The state of one distributed optimizer, a share of it in host memory.

    Outside of an update all state is in ordinary tensors, some of them in host memory: it can be read, stored, and
    loaded into. After a load call `settle`.

    Args:
        megatron: a `DistributedOptimizer` that has parameters; its inner optimizer is Adam.
        share: share of its numbers to offload, above 0; whole parameters, in their order, until it is reached.
    """

    def __init__(self, megatron: Any, share: float) -> None:
        self._megatron, self._inner = megatron, megatron.optimizer
        self._step, self._write_weights = self._inner.step, megatron._copy_main_params_to_model_params
        masters = _pairs(megatron.shard_fp32_from_float16_groups, megatron.model_float16_groups)
        targets = [target for group in self._inner.param_groups for target in group["params"]]
        left, chosen = share * sum(target.numel() for target in targets), list[_Offloaded]()
        for target in targets:
            if left <= 0:
                break
            chosen.append(_Offloaded(target, masters.get(target)))
            left -= target.numel()
        self._offloaded = chosen
        self._pieces = _pieces(chosen)
        self._resident = targets[len(chosen) :]
        self._place()
        # Megatron writes all weights after a step: those of pieces are written already.
        resident = [_Offloaded(each, masters[each]) for each in self._resident if each in masters]
        self._inner.step, megatron._copy_main_params_to_model_params = self._update, partial(self._write, resident)

    @property
    def host_bytes(self) -> int:
        """State in host memory, in bytes."""
        return sum(home.nbytes for each in self._offloaded for home in each.homes.values())

    def _place(self) -> None:
        """Moves the offloaded state into host memory, and gives every parameter its initial state."""
        places = [
            (each, name)
            for each in self._offloaded
            for name in (*_MOMENTS, *(["master"] if each.model is not None else []))
        ]
        homes = host_tensors([each.target.numel() for each, _ in places], torch.float32)
        for (each, name), home in zip(places, homes, strict=True):
            each.homes[name] = home.view(each.target.shape)
        for each in self._offloaded:
            if each.model is not None:
                each.homes["master"].copy_(each.target)
                each.target.data = each.homes["master"]
            self._inner.state[each.target] |= {name: each.homes[name].zero_() for name in _MOMENTS}
        make_moments(self._megatron)

    def settle(self) -> None:
        """Copies state that a load has replaced back to its place in pinned host memory."""
        for each in self._offloaded:
            moments = self._inner.state[each.target]
            for name in _MOMENTS:
                if moments[name] is not each.homes[name]:
                    each.homes[name].copy_(moments[name])
                    moments[name] = each.homes[name]

    # --- an update ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Surrounds an update of Megatron's optimizer: master weights accept gradients on the device meanwhile."""
        masters = [each for each in self._offloaded if each.model is not None]
        for each in masters:
            # One number expanded to the tensor's shape: its values are only read from a slot.
            each.target.data = torch.zeros((), device=platform.device()).expand(each.target.shape)
        try:
            yield
        finally:
            for each in masters:
                each.target.grad = None
                each.target.data = each.homes["master"]

    def _update(self) -> None:
        """Replaces the inner optimizer's step: updates resident parameters and all pieces, and writes the weights of
        the pieces."""
        device = platform.device()
        groups = self._inner.param_groups
        counted = self._step_on(groups, self._resident)
        size = max(piece.num_elements for piece in self._pieces)
        names = dict.fromkeys(name for each in self._offloaded for name in each.homes)
        slots = [_Slot(size, names, device) for _ in range(PIECES)]
        computing, fetching, returning = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        # Kernels launched before may still read the slots' memory.
        fetching.wait_stream(computing)
        arrived = self._fetch(self._pieces[0], slots[0], fetching)
        for number, piece in enumerate(self._pieces):
            slot, here = slots[number % PIECES], arrived
            if number + 1 < len(self._pieces):
                arrived = self._fetch(self._pieces[number + 1], slots[(number + 1) % PIECES], fetching)
            computing.wait_event(here)
            self._compute(piece, slot, groups)
            returning.wait_event(computing.record_event())
            with torch.cuda.stream(returning):
                for each in piece.parts:
                    for name, home in each.homes.items():
                        home.copy_(slot.view(each, name, piece), non_blocking=True)
                slot.free = returning.record_event()
        # From now on the host may read the state, and the slots are freed.
        returning.synchronize()
        for group, after in zip(groups, counted, strict=True):
            # Transformer Engine counts steps by group.
            group.update({name: value for name, value in after.items() if name != "params"})

    def _fetch(self, piece: _Piece, slot: _Slot, stream: Any) -> Any:
        """Starts the copies of a piece into a slot, once the slot is free; returns the event of their end."""
        with torch.cuda.stream(stream):
            if slot.free is not None:
                stream.wait_event(slot.free)
            for each in piece.parts:
                for name, home in each.homes.items():
                    slot.view(each, name, piece).copy_(home, non_blocking=True)
            return stream.record_event()

    def _compute(self, piece: _Piece, slot: _Slot, groups: Sequence[dict[str, Any]]) -> None:
        """Updates a piece that is in a slot, and writes its weights."""
        for each in piece.parts:
            views = {name: slot.view(each, name, piece) for name in each.homes}
            if each.model is not None:
                each.target.data = views.pop("master")
            self._inner.state[each.target].update(views)
        self._step_on(groups, [each.target for each in piece.parts])
        self._write([each for each in piece.parts if each.model is not None])
        for each in piece.parts:
            self._inner.state[each.target].update({name: each.homes[name] for name in _MOMENTS})

    def _step_on(self, groups: Sequence[dict[str, Any]], targets: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Makes a step of the inner optimizer on some parameters; returns the groups after it. `groups` do not
        change."""
        chosen = set(targets)
        some = [{**group, "params": [each for each in group["params"] if each in chosen]} for group in groups]
        self._inner.param_groups = some
        try:
            self._step()
        finally:
            self._inner.param_groups = groups
        return some

    def _write(self, parts: Sequence[_Offloaded]) -> None:
        """Writes master weights into the model, as Megatron does."""
        kept = {name: getattr(self._megatron, name) for name in _GROUPS}
        some = ([[each.model for each in parts]], [[each.target for each in parts]], [], [])
        try:
            for name, groups in zip(_GROUPS, some, strict=True):
                setattr(self._megatron, name, groups)
            self._write_weights()
        finally:
            for name, groups in kept.items():
                setattr(self._megatron, name, groups)


@dataclass(slots=True, eq=False)
class _Piece:
    """Parameters that are updated together. begins: by part, the offset of each of its tensors in a slot, in
    numbers."""

    parts: list[_Offloaded]
    begins: dict[_Offloaded, int]
    num_elements: int


class _Slot:
    """Room on the device for one piece: float32, a row for each kind of tensor. free: event after which the slot can be
    written again; None before its first use."""

    def __init__(self, num_elements: int, names: Iterable[str], device: torch.device) -> None:
        self._rows = {name: torch.empty(num_elements, device=device) for name in names}
        self.free: Any = None

    def view(self, part: _Offloaded, name: str, piece: _Piece) -> Tensor:
        begin = piece.begins[part]
        return self._rows[name][begin : begin + part.target.numel()].view(part.target.shape)


def _pieces(parts: Sequence[_Offloaded]) -> list[_Piece]:
    """Cuts parameters into pieces of at most `PIECE_ELEMENTS`, a larger one by itself."""
    pieces: list[_Piece] = []
    for part in parts:
        size = -(-part.target.numel() // _ALIGNED) * _ALIGNED
        if not pieces or pieces[-1].num_elements + size > PIECE_ELEMENTS:
            pieces.append(_Piece([], {}, 0))
        piece = pieces[-1]
        piece.parts.append(part)
        piece.begins[part] = piece.num_elements
        piece.num_elements += size
    return pieces


def _pairs(left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> dict[Tensor, Tensor]:
    """Returns the tensors of the right lists by those at the same place of the left lists."""
    return {a: b for some, others in zip(left, right, strict=True) for a, b in zip(some, others, strict=True)}
