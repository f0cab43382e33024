"""The routing rows of one rank: targets and keys of a microbatch, and what was seen of them.

Runs in every trainer rank. Shape legend: t routing rows of this rank, l its MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.contract.trajectory import ModelSpec
from moerl.trainer import platform, routing_checksums


@dataclass(frozen=True, slots=True, eq=False)
class TracedRows:
    """What reached the dispatchers, row by row, without pad rows.

    keys: uint64 [r], salt of the row's rollout. positions: int64 [r]. moe_layers: int64 [l]. checksums_rl: uint64,
    `moerl.contract.routing.row_checksums` of what was dispatched. routed_r: bool; False where the row was left to the
    router.
    """

    keys: NDArray[np.uint64]
    positions: NDArray[np.int64]
    moe_layers: NDArray[np.int64]
    checksums_rl: NDArray[np.uint64]
    routed_r: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRouting:
    """The trainer's own routing of a forward pass, for later passes to enforce.

    batches: this rank's shares with that routing, every row of them. traces: per microbatch, what was dispatched.
    """

    batches: list[Microbatch]
    traces: list[TracedRows]


@dataclass(slots=True)
class LocalRows:
    """This rank's routing rows of a microbatch: sequence parallelism slices its context-parallel rows once more.

    routed_t: the row's routing was captured. proved_t: captured and no padding. num_live: rows left to the router, no
    padding. recorded, traced: per hook, see `Replay`.
    """

    expert_ids_tlK: Tensor | None
    keys_t: Tensor
    is_pad_t: Tensor
    routed_t: Tensor
    proved_t: Tensor
    num_live: int
    layers_differing_t: Tensor
    recorded: dict[int, Tensor] = field(default_factory=dict)
    traced: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Microbatch, layout: RankCoordinates) -> LocalRows:
        device = platform.device()
        mine = routing_slice(batch, layout)
        routed = batch.routed[mine]
        return cls(
            expert_ids_tlK=None if batch.expert_ids is None else torch.from_numpy(batch.expert_ids.copy()).to(device),
            keys_t=routing_checksums.row_keys(batch, layout.dims.context, layout.context_rank)[mine].to(device),
            is_pad_t=torch.from_numpy(batch.is_pad[mine].copy()).to(device),
            routed_t=torch.from_numpy(routed.copy()).to(device),
            proved_t=torch.from_numpy(routed & ~batch.is_pad[mine]).to(device),
            num_live=int((~routed & ~batch.is_pad[mine]).sum()),
            layers_differing_t=torch.zeros(len(routed), dtype=torch.int32, device=device),
        )

    def recorded_choices(self, num_layers: int, spec: ModelSpec) -> NDArray[np.int64]:
        """int64 [t, l, K]: what the routers chose; a stage of dense layers alone has no layer here."""
        choices = np.zeros((len(self.keys_t), num_layers, spec.experts_per_token), np.int64)
        for layer in range(num_layers):
            choices[:, layer] = self.recorded[layer].cpu().numpy()
        return choices

    def traced_checksums(self, num_layers: int) -> NDArray[np.uint64]:
        """uint64 [t, l]: checksums of what was dispatched, row by row."""
        checksums = np.zeros((len(self.keys_t), num_layers), np.int64)
        for layer in range(num_layers):
            checksums[:, layer] = self.traced[layer].numpy()
        return checksums.view(np.uint64)


def routing_slice(batch: Microbatch, layout: RankCoordinates) -> slice:
    """The rows of a share that sequence parallelism gives to this rank's routers."""
    num_rows = batch.num_rows // layout.dims.tensor
    return slice(layout.tensor_rank * num_rows, (layout.tensor_rank + 1) * num_rows)
