"""Columns of an engine's expert ids that are the model's MoE layers: agreed in the handshake, never guessed.

Some engines report every decoder layer, others the MoE layers alone; with a dense layer in front the two differ by a
shift that no shape check finds when layers are otherwise alike. Pure data; any process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moerl.contract.ports import EngineInfo, ReportedLayers, RolloutRecord
from moerl.contract.reasons import Reason
from moerl.contract.requirements import require
from moerl.errors import EngineError


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """The columns of an engine's `expert_ids` to take."""

    num_reported: int
    """Layers (columns) that every record must have."""
    columns: tuple[int, ...]
    """Columns of the MoE layers, in order, from 0."""

    def of(self, record: RolloutRecord) -> RolloutRecord:
        """Returns the record with the MoE layers' columns alone. Leaves values without such a table as they are: the
        contract checks them later.

        Raises:
            ContractError: the expert ids are not of the announced number of layers.
        """
        expert_ids = record.values.get("expert_ids") if type(record.values) is dict else None
        if not isinstance(expert_ids, np.ndarray) or expert_ids.ndim != 3:
            return record
        agrees = expert_ids.shape[1] == self.num_reported
        expected = f"{self.num_reported} layers, as in the handshake of engine {record.engine_id!r}"
        require(agrees, Reason.WRONG_SHAPE, "expert_ids", expert_ids.shape, expected)
        if self.columns == tuple(range(self.num_reported)):
            return record
        return replace(record, values={**record.values, "expert_ids": expert_ids[:, list(self.columns)]})


def select_layers(info: EngineInfo, num_layers: int, moe_layers: tuple[int, ...]) -> LayerSelection:
    """Returns the columns to take of the expert ids of the engine that gave this handshake.

    Args:
        num_layers: decoder layers of the model. moe_layers: those with experts, from 0, ascending.

    Raises:
        EngineError: the engine reports other layers than it announced, or than the model has.
    """
    expected = tuple(range(num_layers)) if info.reported_layers == ReportedLayers.ALL else moe_layers
    if info.layer_numbers != expected:
        raise EngineError(
            f"engine {info.engine_id!r} does not report the layers of this model",
            seen=f"{info.reported_layers} layers, numbered {info.layer_numbers}",
            expected=f"{expected} ({num_layers} decoder layers, experts in {moe_layers})",
            remedy="start the engine from the model directory of this run; layer numbers count dense layers, from 0",
        )
    return LayerSelection(len(expected), tuple(expected.index(layer) for layer in moe_layers))
