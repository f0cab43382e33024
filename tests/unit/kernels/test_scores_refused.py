"""What no score is given for."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import (
    PADDED,
    VOCAB,
    WHOLE,
    kept_rows,
    make_case,
)

from moerl.errors import ContractError
from moerl.kernels.head import Head
from moerl.kernels.scores import score_kept


def test_a_listed_set_without_its_target_is_refused() -> None:
    case = make_case([3, 4])
    row_ids = case.kept.ids[case.kept.rows == 1]
    case.targets[1] = next(token for token in range(VOCAB) if token not in row_ids)
    with pytest.raises(ContractError, match="target_not_in_kept_set"):
        score_kept(case.inputs(), case.targets, case.kept, case.temperatures)


def test_a_listed_padding_column_is_refused() -> None:
    case = make_case([3])
    kept = kept_rows([np.array([int(case.targets[0]), VOCAB], np.int32)])
    with pytest.raises(ContractError, match="kept_id_outside_vocabulary"):
        score_kept(case.inputs(), case.targets, kept, case.temperatures)


@pytest.mark.parametrize("target", [-1, VOCAB, PADDED + 3])
def test_an_open_row_whose_target_is_no_token_is_refused(target: int) -> None:
    case = make_case([3, 0])
    case.targets[1] = target
    with pytest.raises(ContractError, match="target_outside_vocabulary"):
        score_kept(case.inputs(), case.targets, case.kept, case.temperatures)


@pytest.mark.parametrize("row", [0, 1])
def test_a_scored_row_with_temperature_zero_is_refused(row: int) -> None:
    case = make_case([3, 0])
    case.temperatures[row] = 0.0
    with pytest.raises(ContractError, match="temperature_not_positive"):
        score_kept(case.inputs(), case.targets, case.kept, case.temperatures)


def test_per_row_tensors_of_another_microbatch_are_refused() -> None:
    case = make_case([3, 0])
    with pytest.raises(ContractError, match="rows_differ"):
        score_kept(case.inputs(), case.targets, make_case([3]).kept, case.temperatures)


def test_a_head_of_another_shape_or_dtype_is_refused() -> None:
    case = make_case([3])
    for head in (Head(case.weight[:-1], WHOLE), Head(case.weight[:, :-1], WHOLE), Head(case.weight.double(), WHOLE)):
        with pytest.raises(ContractError, match="wrong_shape"):
            head.enter(case.hidden)
