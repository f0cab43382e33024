"""The routing rows of one rank: targets and keys of a microbatch, observations of its rows, and their salts.

The salted checksum of `moerl.contract.routing` is computed from the routing map that is handed to the token dispatcher
(`moerl.kernels.routing`), and compared with the one computed from the trajectories before packing.
Runs in every trainer rank. Shape legend: t routing rows of this rank, l its MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.contract.routing import POSITION_PRIME
from moerl.contract.shares import context_rows
from moerl.kernels.mixing import mix, signed
from moerl.kernels.routing_inputs import RoutedRows
from moerl.trainer import platform, transfers


@dataclass(frozen=True, slots=True, eq=False)
class TracedRows:
    """Rows that reached the dispatchers, without pad rows."""

    keys: NDArray[np.uint64]
    """uint64 [r]; salt of each row's rollout."""
    positions: NDArray[np.int64]
    """int64 [r]; position of each row's token in its sequence."""
    moe_layers: NDArray[np.int64]
    """int64 [l]; this rank's MoE layers, as indices among those of the model."""
    checksums_rl: NDArray[np.uint64]
    """uint64; `moerl.contract.routing.row_checksums` of the dispatched routing."""
    routed_r: NDArray[np.bool_]
    """bool; False if the row was left to the router."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRouting:
    """The trainer's own routing of a forward pass, for later passes to enforce."""

    batches: list[Microbatch]
    """This rank's shares with that routing on every row."""
    traces: list[TracedRows]
    """Dispatched rows, per microbatch."""


class LocalRows:
    """This rank's routing rows of a microbatch: sequence parallelism slices its context-parallel rows once more.

    Starts the copy of the rows to the device; call `arrive` before they are read.

    Attributes:
        expert_ids_ltK: uint8 or uint16, or None; layer by layer, as routers ask for them.
        routed_t, proved_t: bool; rows whose routing was captured, and those of them that are no padding.
        of_map: salts of all rows, rows that checksums are over, rows that are no padding.
        num_live, num_proved: numbers of rows left to the router, and of captured rows; no padding.
        layers_differing_t: int32. recorded, traced: per hook, see `Replay`.
    """

    def __init__(self, batch: Microbatch, layout: RankCoordinates, *, count_all: bool) -> None:
        mine = routing_slice(batch, layout)
        routed_t, real_t = batch.routed[mine], ~batch.is_pad[mine]
        self.counted = real_t if count_all else routed_t & real_t
        self.num_live, self.num_proved = int((~routed_t & real_t).sum()), int((routed_t & real_t).sum())
        keys_t = row_keys(batch, layout.dims.context, layout.context_rank)[mine].numpy()
        experts = () if batch.expert_ids is None else (batch.expert_ids.swapaxes(0, 1),)
        self._upload = transfers.Upload(keys_t, routed_t, self.counted, real_t, routed_t & real_t, *experts)
        self.layers_differing_t = torch.zeros(len(routed_t), dtype=torch.int32, device=platform.device())
        self.recorded: dict[int, Tensor] = {}
        self.traced: dict[int, Tensor] = {}
        self.expert_ids_ltK: Tensor | None = None

    def arrive(self) -> None:
        """Makes kernels that are launched next wait for the rows."""
        keys_t, self.routed_t, counted_t, real_t, self.proved_t, *experts = self._upload.arrive()
        self.of_map = RoutedRows(keys_t, counted_t, real_t)
        if experts:
            (self.expert_ids_ltK,) = experts

    def by_row(self, of_layers: Mapping[int, Tensor], shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Returns `recorded` or `traced`, layer by layer [t, ...], as one array [t, *shape]. shape: [l, ...]; l is 0 in
        a stage of dense layers alone."""
        out = np.zeros((len(self.counted), *shape), np.int64)
        for layer, numbers in enumerate(transfers.to_host([of_layers[layer] for layer in range(shape[0])])):
            out[:, layer] = numbers.numpy()
        return out


def routing_slice(batch: Microbatch, layout: RankCoordinates) -> slice:
    """Returns the rows of a share that sequence parallelism gives to this rank's routers."""
    num_rows = batch.num_rows // layout.dims.tensor
    return slice(layout.tensor_rank * num_rows, (layout.tensor_rank + 1) * num_rows)


# --- salts -----------------------------------------------------------------------------------------------------------


def row_keys(batch: Microbatch, context: int, context_rank: int, *, ahead: int = 0) -> Tensor:
    """Returns the salt of every row of a context-parallel rank, from its rollout and token position: int64 [t].

    Args:
        batch: that rank's share. ahead: added to positions.
    """
    keys_t, positions_t = row_origins(batch, context, context_rank)
    places_t = torch.from_numpy(positions_t + ahead)
    return mix(torch.from_numpy(keys_t.view(np.int64)) + places_t * signed(POSITION_PRIME))


def row_origins(batch: Microbatch, context: int, context_rank: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Returns the salt of the rollout and the token position of every row of a context-parallel rank: uint64 [t] and
    int64 [t]."""
    keys_T = np.repeat(batch.rollout_keys, np.diff(batch.cu_seqlens))
    return keys_T[context_rows(batch.cu_seqlens, context, context_rank)], batch.position_ids.astype(np.int64)


def as_signed(checksums: np.ndarray) -> Tensor:
    """Returns uint64 checksums as int64 bit patterns."""
    return torch.from_numpy(checksums.view(np.int64).copy())
