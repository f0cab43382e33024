"""Rules of parallel layouts, against an independent restatement, and the layouts proposed for impossible ones."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
from factories import hf_config
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.contract.parallel import ParallelDims
from moerl.machine.layouts import LayoutLoad, as_overrides, distance, layout_problems, nearest_layouts, propose
from moerl.models.description import LatentAttention, ModelDescription, describe

PLAIN = describe(hf_config(num_hidden_layers=4), "config.json")
DENSE_FIRST = replace(PLAIN, moe_layers=(1, 2, 3), intermediate_size=60, shared_size=64)
LATENT = replace(PLAIN, latent=LatentAttention(6, 8, 8, 4, 8), num_attention_heads=8, num_key_value_heads=3)


def keys(dims: ParallelDims, sizes: ModelDescription | None = PLAIN, load: LayoutLoad | None = None) -> list[str]:
    return [problem.key.removeprefix("parallel.") for problem in layout_problems(dims, sizes, load)]


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(data=2),
        ParallelDims(tensor=2),
        ParallelDims(pipeline=3),
        ParallelDims(pipeline=4),
        ParallelDims(pipeline=2, virtual_pipeline=2),
        ParallelDims(expert=2, data=2),
        ParallelDims(expert_tensor=2, data=2),
        ParallelDims(tensor=2, expert_tensor=2, expert=2, data=2),
        ParallelDims(context=2),
        ParallelDims(context=2, expert=2),
        ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2, context=2, expert=8, data=2),
    ],
    ids=lambda dims: as_overrides(dims),
)
def test_what_megatron_runs_is_accepted(dims: ParallelDims):
    assert keys(dims, load=LayoutLoad(64, 8)) == []


@pytest.mark.parametrize(
    ("dims", "sizes", "key"),
    [
        (ParallelDims(tensor=3), replace(PLAIN, num_key_value_heads=3, head_dim=6), "tensor"),
        (ParallelDims(tensor=2), replace(PLAIN, num_attention_heads=6, num_key_value_heads=3), "tensor"),
        (ParallelDims(tensor=4), PLAIN, None),
        (ParallelDims(tensor=4), replace(PLAIN, num_key_value_heads=1, head_dim=9), "tensor"),
        (ParallelDims(tensor=8), replace(PLAIN, num_key_value_heads=8, num_attention_heads=8), None),
        (ParallelDims(pipeline=5), PLAIN, "pipeline"),
        (ParallelDims(pipeline=2, virtual_pipeline=3), PLAIN, "virtual_pipeline"),
        (ParallelDims(virtual_pipeline=2), PLAIN, "virtual_pipeline"),
        (ParallelDims(expert=3, data=3), PLAIN, "expert"),
        (ParallelDims(expert_tensor=5, data=5), PLAIN, "expert_tensor"),
        (ParallelDims(expert=2), PLAIN, "data"),
        (ParallelDims(expert=2, expert_tensor=2, data=2), PLAIN, "data"),
        (ParallelDims(tensor=8), replace(DENSE_FIRST, num_attention_heads=8, num_key_value_heads=8), "tensor"),
        (ParallelDims(tensor=2), LATENT, None),
        (ParallelDims(tensor=4), LATENT, "tensor"),
        (ParallelDims(tensor=2), replace(LATENT, latent=LatentAttention(0, 8, 8, 3, 8)), "tensor"),
    ],
)
def test_each_rule_names_the_size_to_change(dims: ParallelDims, sizes: ModelDescription, key: str | None):
    assert keys(dims, sizes) == ([] if key is None else [key])


def test_the_load_must_reach_every_rank():
    assert keys(ParallelDims(data=4), load=LayoutLoad(64, 3)) == ["data"]
    assert keys(ParallelDims(tensor=2), load=LayoutLoad(2, 1)) == []
    assert keys(ParallelDims(tensor=2), load=LayoutLoad(1, 1)) == ["tensor"]
    assert keys(ParallelDims(tensor=2, context=2), load=LayoutLoad(8, 1)) == []
    assert keys(ParallelDims(tensor=2, context=2), load=LayoutLoad(7, 1)) == ["context"]


def test_without_a_model_only_the_sizes_among_themselves_are_looked_at():
    assert keys(ParallelDims(tensor=3, pipeline=5), None) == []
    assert keys(ParallelDims(expert=2, virtual_pipeline=2), None) == ["data", "virtual_pipeline"]


# --- against a restatement by construction ---------------------------------------------------------------------------

AXES = st.sampled_from([1, 2, 3, 4, 6, 8])
DIMS = st.builds(ParallelDims, AXES, AXES, st.sampled_from([1, 2, 3]), AXES, AXES, st.sampled_from([1, 2, 3, 4]), AXES)
LOADS = st.builds(LayoutLoad, st.integers(1, 40), st.integers(1, 10))


@st.composite
def models(draw: st.DrawFn) -> ModelDescription:
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


def megatron_takes(dims: ParallelDims, sizes: ModelDescription, load: LayoutLoad) -> bool:
    """The rules again, by dealing out ranks, heads, layers, experts and rows."""
    world = list(itertools.product(*(range(n) for n in (dims.pipeline, dims.data, dims.context, dims.tensor))))
    stage = [rank for rank in world if rank[0] == 0]
    replicas = len(stage) / (dims.expert * dims.expert_tensor)
    interleaves = dims.virtual_pipeline == 1 or splits(sizes.num_layers, dims.pipeline * dims.virtual_pipeline)
    tensor_splits = [sizes.num_attention_heads, sizes.shared_size]
    if sizes.latent:
        tensor_splits += [sizes.latent.q_rank, sizes.latent.kv_rank + sizes.latent.rope_dim]
    else:
        tensor_splits.append((sizes.num_attention_heads + 2 * sizes.num_key_value_heads) * sizes.head_dim)
        key_values = max(sizes.num_key_value_heads, dims.tensor), min(sizes.num_key_value_heads, dims.tensor)
        if not splits(*key_values):
            return False
    if len(sizes.moe_layers) != sizes.num_layers:
        tensor_splits.append(sizes.intermediate_size)
    padded = [rows for rows in range(1, load.microbatch_tokens + 1) if rows_fit(rows, dims)]
    return (
        replicas >= 1
        and replicas.is_integer()
        and interleaves
        and all(len(range(stage, sizes.num_layers, dims.pipeline)) for stage in range(dims.pipeline))
        and (dims.pipeline > 1 or dims.virtual_pipeline == 1)
        and all(splits(size, dims.tensor) for size in tensor_splits)
        and splits(sizes.num_experts, dims.expert)
        and splits(sizes.moe_intermediate_size, dims.expert_tensor)
        and bool(padded)
        and load.samples >= dims.data
    )


def rows_fit(rows: int, dims: ParallelDims) -> bool:
    """One sequence of `rows` rows can be cut over context-parallel chunks and then tensor-parallel ranks."""
    chunks = 1 if dims.context == 1 else 2 * dims.context
    return splits(rows, chunks) and splits(rows // chunks, dims.tensor)


@settings(max_examples=400, deadline=None)
@given(DIMS, models(), LOADS)
def test_the_rules_agree_with_dealing_everything_out(dims: ParallelDims, sizes: ModelDescription, load: LayoutLoad):
    assert (not layout_problems(dims, sizes, load)) == megatron_takes(dims, sizes, load)


@settings(max_examples=60, deadline=None)
@given(DIMS, models(), LOADS)
def test_only_valid_layouts_are_proposed_and_a_valid_one_is_its_own_nearest(
    dims: ParallelDims, sizes: ModelDescription, load: LayoutLoad
):
    near = nearest_layouts(dims, sizes, load)
    assert all(megatron_takes(candidate, sizes, load) for candidate in near)
    assert len(set(near)) == len(near) <= 3
    if megatron_takes(dims, sizes, load):
        assert near[0] == dims


# --- near layouts ----------------------------------------------------------------------------------------------------


def test_layouts_of_as_many_processes_come_first_and_nearer_ones_before_others():
    asked = ParallelDims(tensor=8, expert=2)
    near = nearest_layouts(asked, PLAIN, count=6)
    assert near[0] == ParallelDims(tensor=4, expert=2, data=2)
    same = [dims for dims in near if dims.world_size == 8]
    assert near[: len(same)] == same
    distances = [distance(asked, dims) for dims in same]
    assert distances == sorted(distances)


def test_a_size_without_any_valid_layout_is_answered_by_other_sizes():
    asked = ParallelDims(tensor=5)
    assert nearest_layouts(asked, PLAIN, LayoutLoad(64, 4), world_size=5) == []
    assert [dims.world_size for dims in nearest_layouts(asked, PLAIN, LayoutLoad(64, 4))] == [4, 4, 4]


def test_a_further_condition_is_kept():
    near = nearest_layouts(ParallelDims(tensor=2, data=4), PLAIN, world_size=8, accept=lambda dims: dims.expert == 8)
    assert len(near) == 3
    assert all(dims.expert == 8 and dims.world_size == 8 for dims in near)


def test_proposals_can_be_pasted_behind_what_was_asked():
    asked = ParallelDims(tensor=8, pipeline=3)
    assert as_overrides(ParallelDims()) == "parallel=single"
    assert as_overrides(ParallelDims(tensor=2), asked) == "parallel.tensor=2 parallel.pipeline=1"
    assert as_overrides(ParallelDims(expert=2, data=2)) == "parallel.expert=2 parallel.data=2"
    for line in propose(asked, PLAIN).split("; or "):
        overrides, _, processes = line.partition(" (")
        values = asdict(asked) | {
            name.removeprefix("parallel."): int(value)
            for name, _, value in (part.partition("=") for part in overrides.split())
        }
        dims = ParallelDims(**values)
        assert not layout_problems(dims, PLAIN)
        assert dims.world_size == int(processes.split()[0])


def test_replicas_of_experts_are_counted_within_a_stage():
    assert ParallelDims(tensor=2, pipeline=2, context=2, expert=4, data=4).expert_data == 4
