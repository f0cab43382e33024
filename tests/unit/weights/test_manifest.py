"""The manifest that a trainer's ranks make up, and the one that is worked out from sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from families import FAMILIES

from moerl.contract.parallel import ParallelDims
from moerl.errors import WeightSyncError
from moerl.models.description import ModelDescription, describe
from moerl.weights.manifest import WeightManifest, encode_shards, merge_shards, model_manifest
from moerl.weights.plan import PlanOptions, make_plan

LAYOUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(tensor=2, expert=2),
    ParallelDims(tensor=2, expert_tensor=2),
    ParallelDims(pipeline=2, context=2, expert=2),
    ParallelDims(pipeline=2, virtual_pipeline=2, expert=2, data=4),
]


def model_of(family: str, **changes: Any) -> ModelDescription:
    return describe(FAMILIES[family].config(**changes).to_dict(), family)


def statements(manifest: WeightManifest) -> list[dict[str, Any]]:
    """Returns the statements of ranks with these weights: stand-ins for tensors by name."""
    dtypes = {t.tensor.name: "float32" if t.tensor.element == "float32" else "bfloat16" for t in manifest.tensors}
    return [
        {
            name: SimpleNamespace(shape=shape, dtype=f"torch.{dtypes[name]}")
            for name, shape in manifest.shard_shapes(rank).items()
        }
        for rank in range(manifest.dims.world_size)
    ]


def merged(model: ModelDescription, dims: ParallelDims, ranks: list[dict[str, Any]]) -> WeightManifest:
    return merge_shards(model, dims, [encode_shards(rank) for rank in ranks])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
@pytest.mark.parametrize("split_latents", [False, True])
def test_what_ranks_say_is_what_follows_from_sizes(family: str, dims: ParallelDims, split_latents: bool):
    model = model_of(family)
    expected = model_manifest(model, dims, split_latents=split_latents)
    assert merged(model, dims, statements(expected)) == expected


def test_a_tied_head_is_not_published():
    tied = model_manifest(model_of("qwen3_moe", tie_word_embeddings=True), ParallelDims(pipeline=2))
    assert "output_layer.weight" not in {each.tensor.name for each in tied.tensors}


def test_some_tensors_alone_are_a_manifest_and_their_plan_sends_nothing_else():
    model, dims = model_of("deepseek_v3"), ParallelDims(tensor=2, pipeline=2, expert=2)
    whole = model_manifest(model, dims)
    some = [{n: t for n, t in rank.items() if ".self_attention.linear_proj" in n} for rank in statements(whole)]
    plan = make_plan(merged(model, dims, some), PlanOptions((0,), 2, 1 << 14))
    sent = {entry.name for bucket in plan.buckets for entry in bucket.entries}
    assert sent == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(model.num_layers)}
    assert {name for rank in range(4) for name in plan.manifest.shard_shapes(rank)} == {
        n for rank in some for n in rank
    }


def other_shape(ranks: list[dict[str, Any]]) -> str:
    ranks[1]["decoder.final_layernorm.weight"] = SimpleNamespace(shape=(7,), dtype="torch.bfloat16")
    return "'decoder.final_layernorm.weight' as"


def other_dtype(ranks: list[dict[str, Any]]) -> str:
    name = "decoder.layers.1.mlp.router.expert_bias"
    for rank in ranks:
        rank[name] = SimpleNamespace(shape=rank[name].shape, dtype="torch.bfloat16")
    return f"'{name}' as"


def missing_slice(ranks: list[dict[str, Any]]) -> str:
    del ranks[1]["embedding.word_embeddings.weight"]
    return "slices [0] of 'embedding.word_embeddings.weight'; expected: 2 slices"


def unknown(ranks: list[dict[str, Any]]) -> str:
    ranks[0]["decoder.layers.0.adapter.weight"] = SimpleNamespace(shape=(4, 4), dtype="torch.bfloat16")
    return "1 tensors, first 'decoder.layers.0.adapter.weight'"


@pytest.mark.parametrize("harm", [other_shape, other_dtype, missing_slice, unknown])
def test_shards_that_make_up_no_model_are_refused_by_name(harm: Any):
    model, dims = model_of("deepseek_v3"), ParallelDims(tensor=2)
    ranks = statements(model_manifest(model, dims))
    named = harm(ranks)
    with pytest.raises(WeightSyncError) as caught:
        merged(model, dims, ranks)
    assert named in str(caught.value)
