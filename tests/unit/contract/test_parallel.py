"""Parallel sizes and coordinates of ranks, against Megatron's order of ranks written out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.contract.parallel import ParallelDims, RankCoordinates, smallest_data, stage_layers

AXES = st.sampled_from([1, 2, 3, 4, 6, 8])


# --- coordinates -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(*(st.integers(1, 3) for _ in range(4)))
def test_ranks_are_numbered_tensor_first_then_context_data_and_pipeline(
    tensor: int, context: int, data: int, pipeline: int
):
    dims = ParallelDims(tensor=tensor, pipeline=pipeline, context=context, data=data)
    order = list(itertools.product(range(pipeline), range(data), range(context), range(tensor)))
    found = [(r.pipeline_rank, r.data_rank, r.context_rank, r.tensor_rank) for r in dims.ranks()]
    assert found == order
    assert [r.is_last_stage for r in dims.ranks()] == [at[0] == pipeline - 1 for at in order]


def test_experts_are_dealt_out_over_the_ranks_of_a_stage_anew():
    dims = ParallelDims(tensor=2, pipeline=2, expert=2, expert_tensor=2, data=4)
    first = dims.ranks()[:8]
    assert [r.expert_tensor_rank for r in first] == [0, 1] * 4
    assert [r.expert_rank for r in first] == [0, 0, 1, 1] * 2
    assert [r.expert_rank for r in dims.ranks()[8:]] == [0, 0, 1, 1] * 2
    assert dims.expert_data == 2


def test_row_multiples_follow_from_tensor_and_context():
    assert (ParallelDims(tensor=4).sequence_multiple, ParallelDims(tensor=4).row_multiple) == (1, 4)
    both = ParallelDims(tensor=2, context=3)
    assert (both.sequence_multiple, both.row_multiple) == (12, 12)
    assert RankCoordinates(both, 1).routing_slice == (2, 1)


def test_interleaved_schedules_take_microbatches_in_rounds():
    assert ParallelDims(pipeline=4).microbatch_multiple == 1
    assert ParallelDims(pipeline=4, virtual_pipeline=2).microbatch_multiple == 4


@settings(max_examples=60, deadline=None)
@given(AXES, AXES, AXES, AXES)
def test_the_smallest_data_size_is_the_smallest_that_fills_the_stage(
    tensor: int, context: int, expert: int, expert_tensor: int
):
    fitting = [d for d in range(1, 65) if (tensor * context * d) % (expert * expert_tensor) == 0]
    assert smallest_data(tensor=tensor, context=context, expert=expert, expert_tensor=expert_tensor) == fitting[0]


# --- layers of pipeline stages ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100), st.integers(1, 24))
def test_stages_hold_every_layer_differ_by_one_and_the_last_holds_the_fewest(num_layers: int, pipeline: int):
    if pipeline > num_layers:
        with pytest.raises(ValueError, match="stages"):
            stage_layers(num_layers, pipeline)
        return
    layers = stage_layers(num_layers, pipeline)
    assert len(layers) == pipeline
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) == (num_layers % pipeline > 0)
    assert layers[-1] == min(layers)
    # The first stage has a layer more only where every stage but the last one has.
    assert layers[0] == min(layers) or len(set(layers[:-1])) == 1


def test_layers_left_over_go_to_the_stages_before_the_last():
    assert stage_layers(61, 4) == [15, 15, 16, 15]
    assert stage_layers(94, 4) == [23, 24, 24, 23]
    assert stage_layers(5, 2) == [3, 2]
    assert stage_layers(8, 2, 2) == [4, 4]
    with pytest.raises(ValueError, match="chunks"):
        stage_layers(10, 2, 2)


def test_chunks_of_interleaved_stages_are_dealt_out_in_turn():
    dims = ParallelDims(pipeline=2, virtual_pipeline=2)
    assert [dims.layers_of_stage(8, stage) for stage in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [ParallelDims(pipeline=2).layers_of_stage(5, stage) for stage in (0, 1)] == [[0, 1, 2], [3, 4]]
