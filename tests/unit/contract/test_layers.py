"""Engine and trainer agree on which layers the columns of expert ids are."""

from __future__ import annotations

import numpy as np
import pytest
from factories import SPEC

from moerl.contract.layers import LayerSelection, select_layers
from moerl.contract.ports import EngineInfo, ReportedLayers, RolloutRecord
from moerl.errors import ContractError, EngineError

ALL, MOE = ReportedLayers.ALL, ReportedLayers.MOE
PREFIX = (4, (1, 2, 3))
"""A dense layer in front: the same three MoE layers as a model of which nothing is dense has among its four."""


def info(reported: ReportedLayers, numbers: tuple[int, ...]) -> EngineInfo:
    return EngineInfo("e", SPEC, 0, reported, numbers)


def record(num_layers: int) -> RolloutRecord:
    expert_ids = np.broadcast_to(np.arange(num_layers, dtype=np.uint8)[None, :, None], (6, num_layers, 2))
    return RolloutRecord("r", "e", 0, {"expert_ids": expert_ids, "token_ids": None})


def test_the_columns_of_moe_layers_are_taken_whichever_layers_an_engine_reports():
    assert select_layers(info(MOE, (1, 2, 3)), *PREFIX) == LayerSelection(3, (0, 1, 2))
    assert select_layers(info(ALL, (0, 1, 2, 3)), *PREFIX) == LayerSelection(4, (1, 2, 3))
    taken = select_layers(info(ALL, (0, 1, 2, 3)), *PREFIX).of(record(4))
    assert taken.values["expert_ids"][0, :, 0].tolist() == [1, 2, 3]
    untouched = record(3)
    assert select_layers(info(MOE, (1, 2, 3)), *PREFIX).of(untouched) is untouched


@pytest.mark.parametrize(
    ("reported", "numbers"),
    [
        (MOE, (0, 1, 2)),
        (MOE, (0, 1, 2, 3)),
        (MOE, (1, 2)),
        (MOE, (3, 2, 1)),
        (MOE, ()),
        (ALL, (1, 2, 3)),
        (ALL, (1, 2, 3, 4)),
        (ALL, (0, 1, 2)),
    ],
)
def test_an_engine_that_says_other_layers_than_the_model_has_is_refused(
    reported: ReportedLayers, numbers: tuple[int, ...]
):
    with pytest.raises(EngineError, match="does not report the layers of this model"):
        select_layers(info(reported, numbers), *PREFIX)


@pytest.mark.parametrize("num_layers", [3, 5])
def test_a_table_with_other_columns_than_announced_is_refused_even_where_its_shape_is_the_models(num_layers: int):
    with pytest.raises(ContractError, match="4 layers, as in the handshake"):
        select_layers(info(ALL, (0, 1, 2, 3)), *PREFIX).of(record(num_layers))
