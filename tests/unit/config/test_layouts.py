"""Rules of parallel layouts, against an independent restatement, and the shapes proposed for impossible ones."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
from factories import hf_config
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config.layouts import (
    Load,
    Shape,
    distance,
    layout_problems,
    nearest_layouts,
    propose,
    smallest_data,
    stage_layers,
)
from moerl.config.model_sizes import LatentAttention, ModelSizes, sizes_from_hf_config

PLAIN = sizes_from_hf_config(hf_config(num_hidden_layers=4), "config.json")
DENSE_FIRST = replace(PLAIN, moe_layers=(1, 2, 3), intermediate_size=60, shared_size=64)
LATENT = replace(PLAIN, latent=LatentAttention(6, 8, 8, 4, 8), num_attention_heads=8, num_key_value_heads=3)


def keys(shape: Shape, sizes: ModelSizes | None = PLAIN, load: Load | None = None) -> list[str]:
    return [problem.key.removeprefix("parallel.") for problem in layout_problems(shape, sizes, load)]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(data=2),
        Shape(tensor=2),
        Shape(pipeline=3),
        Shape(pipeline=4),
        Shape(pipeline=2, virtual_pipeline=2),
        Shape(expert=2, data=2),
        Shape(expert_tensor=2, data=2),
        Shape(tensor=2, expert_tensor=2, expert=2, data=2),
        Shape(context=2),
        Shape(context=2, expert=2),
        Shape(tensor=2, pipeline=2, virtual_pipeline=2, context=2, expert=8, data=2),
    ],
    ids=lambda shape: shape.overrides(),
)
def test_what_megatron_runs_is_accepted(shape: Shape):
    assert keys(shape, load=Load(64, 8)) == []


@pytest.mark.parametrize(
    ("shape", "sizes", "key"),
    [
        (Shape(tensor=3), replace(PLAIN, num_key_value_heads=3, head_dim=6), "tensor"),
        (Shape(tensor=2), replace(PLAIN, num_attention_heads=6, num_key_value_heads=3), "tensor"),
        (Shape(tensor=4), PLAIN, None),
        (Shape(tensor=4), replace(PLAIN, num_key_value_heads=1, head_dim=9), "tensor"),
        (Shape(tensor=8), replace(PLAIN, num_key_value_heads=8, num_attention_heads=8), None),
        (Shape(pipeline=5), PLAIN, "pipeline"),
        (Shape(pipeline=2, virtual_pipeline=3), PLAIN, "virtual_pipeline"),
        (Shape(virtual_pipeline=2), PLAIN, "virtual_pipeline"),
        (Shape(expert=3, data=3), PLAIN, "expert"),
        (Shape(expert_tensor=5, data=5), PLAIN, "expert_tensor"),
        (Shape(expert=2), PLAIN, "data"),
        (Shape(expert=2, expert_tensor=2, data=2), PLAIN, "data"),
        (Shape(tensor=8), replace(DENSE_FIRST, num_attention_heads=8, num_key_value_heads=8), "tensor"),
        (Shape(tensor=2), LATENT, None),
        (Shape(tensor=4), LATENT, "tensor"),
        (Shape(tensor=2), replace(LATENT, latent=LatentAttention(0, 8, 8, 3, 8)), "tensor"),
    ],
)
def test_each_rule_names_the_size_to_change(shape: Shape, sizes: ModelSizes, key: str | None):
    assert keys(shape, sizes) == ([] if key is None else [key])


def test_the_load_must_reach_every_rank():
    assert keys(Shape(data=4), load=Load(64, 3)) == ["data"]
    assert keys(Shape(tensor=2), load=Load(2, 1)) == []
    assert keys(Shape(tensor=2), load=Load(1, 1)) == ["tensor"]
    assert keys(Shape(tensor=2, context=2), load=Load(8, 1)) == []
    assert keys(Shape(tensor=2, context=2), load=Load(7, 1)) == ["context"]


def test_without_a_model_only_the_sizes_among_themselves_are_looked_at():
    assert keys(Shape(tensor=3, pipeline=5), None) == []
    assert keys(Shape(expert=2, virtual_pipeline=2), None) == ["data", "virtual_pipeline"]


# --- against a restatement by construction ---------------------------------------------------------------------------

AXES = st.sampled_from([1, 2, 3, 4, 6, 8])
SHAPES = st.builds(Shape, AXES, AXES, st.sampled_from([1, 2, 3]), AXES, AXES, st.sampled_from([1, 2, 3, 4]), AXES)
LOADS = st.builds(Load, st.integers(1, 40), st.integers(1, 10))


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    """Small models of every kind."""
    layers = draw(st.integers(1, 12))
    key_values = draw(st.sampled_from([1, 2, 3, 4, 8]))
    dense = draw(st.integers(0, layers - 1))
    return replace(
        PLAIN,
        num_layers=layers,
        moe_layers=tuple(range(dense, layers)),
        num_attention_heads=key_values * draw(st.integers(1, 4)),
        num_key_value_heads=key_values,
        latent=draw(st.none() | st.builds(LatentAttention, AXES.map(lambda n: 2 * n), AXES, AXES, AXES, AXES)),
        intermediate_size=draw(st.sampled_from([12, 24, 40])) if dense else 0,
        num_experts=draw(st.sampled_from([2, 6, 8, 24])),
        moe_intermediate_size=draw(st.sampled_from([8, 12, 24])),
        shared_size=draw(st.sampled_from([0, 12, 24])),
    )


def splits(total: int, ranks: int) -> bool:
    """`ranks` pieces of one whole size each add up to `total`."""
    return sum(total // ranks for _ in range(ranks)) == total


def megatron_takes(shape: Shape, sizes: ModelSizes, load: Load) -> bool:
    """The rules again, by dealing out ranks, heads, layers, experts and rows."""
    world = list(itertools.product(*(range(n) for n in (shape.pipeline, shape.data, shape.context, shape.tensor))))
    stage = [rank for rank in world if rank[0] == 0]
    replicas = len(stage) / (shape.expert * shape.expert_tensor)
    interleaves = shape.virtual_pipeline == 1 or splits(sizes.num_layers, shape.pipeline * shape.virtual_pipeline)
    tensor_splits = [sizes.num_attention_heads, sizes.shared_size]
    if sizes.latent:
        tensor_splits += [sizes.latent.q_rank, sizes.latent.kv_rank + sizes.latent.rope_dim]
    else:
        tensor_splits.append((sizes.num_attention_heads + 2 * sizes.num_key_value_heads) * sizes.head_dim)
        key_values = max(sizes.num_key_value_heads, shape.tensor), min(sizes.num_key_value_heads, shape.tensor)
        if not splits(*key_values):
            return False
    if len(sizes.moe_layers) != sizes.num_layers:
        tensor_splits.append(sizes.intermediate_size)
    padded = [rows for rows in range(1, load.microbatch_tokens + 1) if rows_fit(rows, shape)]
    return (
        replicas >= 1
        and replicas.is_integer()
        and interleaves
        and all(len(range(stage, sizes.num_layers, shape.pipeline)) for stage in range(shape.pipeline))
        and (shape.pipeline > 1 or shape.virtual_pipeline == 1)
        and all(splits(size, shape.tensor) for size in tensor_splits)
        and splits(sizes.num_experts, shape.expert)
        and splits(sizes.moe_intermediate_size, shape.expert_tensor)
        and bool(padded)
        and load.samples >= shape.data
    )


def rows_fit(rows: int, shape: Shape) -> bool:
    """One sequence of `rows` rows can be cut over context-parallel chunks and then tensor-parallel ranks."""
    chunks = 1 if shape.context == 1 else 2 * shape.context
    return splits(rows, chunks) and splits(rows // chunks, shape.tensor)


@settings(max_examples=400, deadline=None)
@given(SHAPES, models(), LOADS)
def test_the_rules_agree_with_dealing_everything_out(shape: Shape, sizes: ModelSizes, load: Load):
    assert (not layout_problems(shape, sizes, load)) == megatron_takes(shape, sizes, load)


@settings(max_examples=60, deadline=None)
@given(SHAPES, models(), LOADS)
def test_only_valid_shapes_are_proposed_and_a_valid_one_is_its_own_nearest(shape: Shape, sizes: ModelSizes, load: Load):
    near = nearest_layouts(shape, sizes, load)
    assert all(megatron_takes(candidate, sizes, load) for candidate in near)
    assert len(set(near)) == len(near) <= 3
    if megatron_takes(shape, sizes, load):
        assert near[0] == shape


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


# --- near shapes -----------------------------------------------------------------------------------------------------


def test_shapes_of_as_many_processes_come_first_and_nearer_ones_before_others():
    asked = Shape(tensor=8, expert=2)
    near = nearest_layouts(asked, PLAIN, count=6)
    assert near[0] == Shape(tensor=4, expert=2, data=2)
    same = [shape for shape in near if shape.world_size == 8]
    assert near[: len(same)] == same
    distances = [distance(asked, shape) for shape in same]
    assert distances == sorted(distances)


def test_a_size_without_any_valid_shape_is_answered_by_other_sizes():
    asked = Shape(tensor=5)
    assert nearest_layouts(asked, PLAIN, Load(64, 4), world_size=5) == []
    assert [shape.world_size for shape in nearest_layouts(asked, PLAIN, Load(64, 4))] == [4, 4, 4]


def test_a_further_condition_is_kept():
    near = nearest_layouts(Shape(tensor=2, data=4), PLAIN, world_size=8, accept=lambda shape: shape.expert == 8)
    assert len(near) == 3
    assert all(shape.expert == 8 and shape.world_size == 8 for shape in near)


def test_proposals_can_be_pasted_behind_what_was_asked():
    asked = Shape(tensor=8, pipeline=3)
    assert Shape().overrides() == "parallel=single"
    assert Shape(tensor=2).overrides(asked) == "parallel.tensor=2 parallel.pipeline=1"
    assert Shape(expert=2, data=2).overrides() == "parallel.expert=2 parallel.data=2"
    for line in propose(asked, PLAIN).split("; or "):
        overrides, _, processes = line.partition(" (")
        values = asdict(asked) | {
            name.removeprefix("parallel."): int(value)
            for name, _, value in (part.partition("=") for part in overrides.split())
        }
        shape = Shape(**values)
        assert not layout_problems(shape, PLAIN)
        assert shape.world_size == int(processes.split()[0])


def test_replicas_of_experts_are_counted_within_a_stage():
    assert Shape(tensor=2, pipeline=2, context=2, expert=4, data=4).expert_data == 4
