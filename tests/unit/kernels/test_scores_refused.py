"""Inputs for which scoring raises an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import PADDED, VOCAB, WHOLE, kept_sets, make_case

from moerl.errors import ContractError
from moerl.kernels.head import Head
from moerl.kernels.plan import plan_full, plan_rows
from moerl.kernels.scores import listed_logprobs, score_full, score_kept


def test_a_listed_set_without_its_target_is_refused() -> None:
    case = make_case([3, 4])
    row_ids = case.kept.ids[case.kept.rows == 1]
    case.targets[1] = next(token for token in range(VOCAB) if token not in row_ids)
    with pytest.raises(ContractError, match="target_not_in_kept_set"):
        case.score()


def test_a_listed_padding_column_is_refused() -> None:
    case = make_case([3])
    case.sets = kept_sets([np.array([int(case.targets[0]), VOCAB], np.int32)])
    with pytest.raises(ContractError, match="kept_id_outside_vocabulary"):
        case.score()


@pytest.mark.parametrize("target", [-1, VOCAB, PADDED + 3])
def test_an_open_row_whose_target_is_no_token_is_refused(target: int) -> None:
    case = make_case([3, 0])
    case.targets[1] = target
    with pytest.raises(ContractError, match=f"target_outside_vocabulary(.|\n)*{target} on row 1"):
        case.score()


@pytest.mark.parametrize("row", [0, 1])
def test_a_scored_row_with_temperature_zero_is_refused(row: int) -> None:
    case = make_case([3, 0])
    case.temperatures[row] = 0.0
    with pytest.raises(ContractError, match=f"temperature_not_positive(.|\n)*0.0 on row {row}"):
        case.score()


@pytest.mark.parametrize("field", ["temperatures_T", "truncated_T", "select_T", "full_T"])
def test_per_row_arrays_of_another_microbatch_are_refused(field: str) -> None:
    case = make_case([3, 0])
    rows = replace(case.rows(), **{field: np.ones(3, np.float32 if field == "temperatures_T" else np.bool_)})
    with pytest.raises(ContractError, match="rows_differ"):
        plan_rows(rows, case.inputs())


@pytest.mark.parametrize("flags", [[True, True], [False, False]])
def test_a_flag_that_disagrees_with_the_list_is_refused(flags: list[bool]) -> None:
    case = make_case([3, 0])
    with pytest.raises(ContractError, match="truncated_disagrees"):
        plan_rows(replace(case.rows(), truncated_T=np.array(flags)), case.inputs())


def test_kept_sets_of_another_number_of_rows_are_refused() -> None:
    case = make_case([3, 0])
    with pytest.raises(ContractError, match="kept_shape"):
        plan_rows(replace(case.rows(), kept=make_case([3, 0, 0]).sets), case.inputs())


def test_a_plan_of_another_microbatch_is_refused() -> None:
    case = make_case([3, 0])
    plan = plan_rows(make_case([3]).rows(), case.inputs())
    for score in (score_kept, score_full, listed_logprobs):
        with pytest.raises(ContractError, match="rows_differ"):
            score(case.inputs(), plan)


def test_a_plan_for_another_shard_is_refused() -> None:
    case = make_case([3, 0])
    plan = plan_rows(case.rows(), case.inputs())
    fewer = Head(case.weight, WHOLE).over(VOCAB - 1).enter(case.hidden)
    with pytest.raises(ContractError, match="rows_differ"):
        score_kept(fewer, plan)


def test_a_row_of_a_kl_with_temperature_zero_is_refused() -> None:
    case = make_case([0, 0])
    case.temperatures[1] = 0.0
    with pytest.raises(ContractError, match=r"temperature_not_positive(.|\n)*0\.0 on row 1"):
        plan_full(case.rows(), np.array([False, True]), case.inputs())
    plan_full(case.rows(), np.array([True, False]), case.inputs())


def test_a_head_of_another_shape_or_dtype_is_refused() -> None:
    case = make_case([3])
    for head in (Head(case.weight[:-1], WHOLE), Head(case.weight[:, :-1], WHOLE), Head(case.weight.double(), WHOLE)):
        with pytest.raises(ContractError, match="wrong_shape"):
            head.enter(case.hidden)
