"""Memory plans: parameter counts against real models and published totals, the rest against the formulas' own words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import QWEN3_30B, hf_config
from published_models import DEEPSEEK_V3, GLM_45, GLM_45_AIR, QWEN3_235B

from moerl.config.load import load_config
from moerl.contract.parallel import ParallelDims
from moerl.kernels import products
from moerl.machine.layouts import layout_problems
from moerl.machine.memory import (
    USABLE_SHARE,
    Needs,
    heaviest_rank,
    rank_memory,
    rank_parameters,
    slab_columns,
    total_parameters,
)
from moerl.machine.residence import ALWAYS, ASLEEP
from moerl.models.description import ModelDescription, describe

OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


def sizes_of(config: dict[str, Any]) -> ModelDescription:
    return describe(config, "config.json")


@pytest.mark.parametrize(
    ("config", "billions", "tolerance"),
    [
        (QWEN3_30B, 30.5, 0.05),
        (QWEN3_235B, 235, 0.5),
        (DEEPSEEK_V3, 671, 0.5),
        (GLM_45, 355, 3),
        (GLM_45_AIR, 106, 1),
        (OLMOE, 6.92, 0.01),
    ],
    ids=["Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3", "GLM-4.5", "GLM-4.5-Air", "OLMoE-1B-7B"],
)
def test_the_parameters_of_published_models_add_up_to_their_names(
    config: dict[str, Any], billions: float, tolerance: float
):
    assert total_parameters(sizes_of(config)) / 1e9 == pytest.approx(billions, abs=tolerance)


TINY_LATENT = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts": None,
    "n_shared_experts": 2,
    "model_type": "deepseek_v3",
}
TINY_GLM = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts": None,
    "n_shared_experts": 1,
    "model_type": "glm4_moe",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 16},
        {"num_hidden_layers": 4, "mlp_only_layers": [2], "tie_word_embeddings": True, "attention_bias": True},
        {"num_hidden_layers": 4, "decoder_sparse_step": 2},
        TINY_LATENT | {"q_lora_rank": 24},
        TINY_LATENT | {"q_lora_rank": 0},
        TINY_GLM | {"attention_bias": True, "use_qk_norm": True},
        TINY_GLM,
        {"model_type": "olmoe", "moe_intermediate_size": None, "num_key_value_heads": 4},
    ],
    ids=[
        "qwen3",
        "qwen3-tied-bias",
        "qwen3-sparse-step",
        "deepseek",
        "deepseek-whole-q",
        "glm-bias-norm",
        "glm",
        "olmoe",
    ],
)
def test_parameters_are_counted_as_transformers_builds_them(changes: dict[str, Any]):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = hf_config(**changes)
    given = {name: value for name, value in values.items() if name != "model_type"}
    if values.get("q_lora_rank") == 0:
        given["q_lora_rank"] = None
    config = AutoConfig.for_model(values["model_type"], **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert total_parameters(sizes_of(values)) == sum(parameter.numel() for parameter in model.parameters())
    assert total_parameters(sizes_of(config.to_dict())) == total_parameters(sizes_of(values))


@pytest.mark.parametrize("config", [QWEN3_30B, GLM_45_AIR], ids=["Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_the_stages_hold_the_model_once(config: dict[str, Any]):
    sizes = sizes_of(config)
    for dims in (ParallelDims(pipeline=2), ParallelDims(pipeline=2, virtual_pipeline=sizes.num_layers // 2)):
        stages = [rank_parameters(sizes, dims, stage) for stage in range(2)]
        assert sum(sum(stage.values()) for stage in stages) == total_parameters(sizes)
        assert (stages[0]["head"], stages[1]["embedding"]) == (0, 0)


def test_each_axis_splits_what_is_its_own():
    sizes = sizes_of(DEEPSEEK_V3)
    whole = rank_parameters(sizes, ParallelDims(), 0)
    expert = rank_parameters(sizes, ParallelDims(expert=8, expert_tensor=2, data=16), 0)
    assert expert["experts"] * 16 == whole["experts"]
    assert {name: count for name, count in expert.items() if name != "experts"} == {
        name: count for name, count in whole.items() if name != "experts"
    }
    tensor = rank_parameters(sizes, ParallelDims(tensor=4), 0)
    for name in ("embedding", "dense MLP", "shared experts", "head"):
        assert tensor[name] * 4 == whole[name]
    for name in ("norms", "router", "experts"):
        assert tensor[name] == whole[name]
    assert whole["attention"] / 4 < tensor["attention"] < whole["attention"] / 3
    assert rank_parameters(sizes, ParallelDims(context=4, data=2), 0) == whole


def test_an_odd_vocabulary_is_padded_and_a_tied_one_copied_to_the_last_stage():
    sizes = replace(sizes_of(hf_config()), vocab_size=91, tie_word_embeddings=True)
    assert rank_parameters(sizes, ParallelDims(tensor=2), 0)["embedding"] == 46 * sizes.hidden_size
    assert rank_parameters(sizes, ParallelDims(tensor=2), 0)["head"] == 0
    assert rank_parameters(sizes, ParallelDims(pipeline=2), 1)["head"] == 91 * sizes.hidden_size


NEEDS = Needs(1024, 2, "none", distributed_optimizer=False, reference=False)


def test_state_is_eighteen_bytes_per_bf16_parameter_and_sixteen_per_fp32_one():
    sizes = sizes_of(QWEN3_30B)
    count = total_parameters(sizes)
    for element_bytes, expected in ((2, 18), (4, 16)):
        memory = rank_memory(sizes, ParallelDims(), replace(NEEDS, element_bytes=element_bytes), 0)
        state = sum(memory.bytes[name] for name in ("weights", "gradients", "optimizer state"))
        assert state == expected * count
    assert rank_memory(sizes, ParallelDims(), replace(NEEDS, reference=True), 0).bytes["reference weights"] == 2 * count


def test_a_distributed_optimizer_splits_over_the_replicas_of_each_parameter():
    sizes = sizes_of(QWEN3_30B)
    dims = ParallelDims(tensor=2, context=2, expert=4, data=4)
    parameters = rank_parameters(sizes, dims, 0)
    dense = sum(parameters.values()) - parameters["experts"]
    split = rank_memory(sizes, dims, replace(NEEDS, distributed_optimizer=True), 0)
    assert split.bytes["optimizer state"] == pytest.approx(12 * (dense / 8 + parameters["experts"] / 4), rel=1e-6)
    assert split.bytes["weights"] == rank_memory(sizes, dims, NEEDS, 0).bytes["weights"]


def test_offloaded_state_is_in_host_memory_but_for_the_pieces_of_an_update():
    sizes, dims = sizes_of(QWEN3_30B), ParallelDims(expert=8, data=8)
    needs = replace(NEEDS, distributed_optimizer=True)
    resident = rank_memory(sizes, dims, needs, 0)
    half, whole = (rank_memory(sizes, dims, replace(needs, offload=share), 0) for share in (0.5, 1.0))
    state = resident.bytes["optimizer state"]
    assert (resident.offloaded_bytes, resident.bytes["pieces of optimizer state"]) == (0, 0)
    assert half.offloaded_bytes == pytest.approx(state / 2) == half.bytes["optimizer state"]
    assert (whole.offloaded_bytes, whole.bytes["optimizer state"]) == (state, 0)
    # Without buckets a rank's part of the dense parameters may be one tensor's.
    dense = sum(resident.parameters.values()) - resident.parameters["experts"]
    assert whole.bytes["pieces of optimizer state"] == 2 * 12 * dense // 8
    small = rank_memory(sizes_of(hf_config()), dims, replace(needs, offload=1.0), 0)
    assert small.bytes["pieces of optimizer state"] == 2 * small.offloaded_bytes


def test_activations_of_one_layer_are_the_sum_that_is_documented():
    sizes = replace(sizes_of(hf_config()), num_layers=1, moe_layers=(0,), shared_size=16)
    heads, key_values = 4 * sizes.head_dim, 2 * sizes.head_dim
    attention = 2 * heads + 2 * key_values + key_values + heads
    moe = sizes.experts_per_token * (32 + 3 * 32) + 3 * 16
    expected = 1024 * (2 * (4 * 32 + attention + moe) + 2 * 8 * 4)
    assert rank_memory(sizes, ParallelDims(), NEEDS, 0).bytes["activations"] == expected
    dense = replace(sizes, moe_layers=(), intermediate_size=64)
    expected = 1024 * 2 * (4 * 32 + attention + 3 * 64)
    assert rank_memory(dense, ParallelDims(), NEEDS, 0).bytes["activations"] == expected


def test_recomputing_more_keeps_less_and_parallel_slices_keep_less():
    sizes = sizes_of(QWEN3_30B)

    def activations(dims: ParallelDims, recompute: str = "none") -> int:
        return rank_memory(sizes, dims, replace(NEEDS, recompute=recompute), 0).bytes["activations"]

    assert activations(ParallelDims()) > activations(ParallelDims(), "selective") > activations(ParallelDims(), "full")
    assert activations(ParallelDims(tensor=2)) == activations(ParallelDims()) // 2
    assert activations(ParallelDims(context=2)) == activations(ParallelDims()) // 2


def test_earlier_stages_keep_more_microbatches_and_interleaving_keeps_more_still():
    sizes = sizes_of(QWEN3_30B)

    def activations(dims: ParallelDims, stage: int) -> int:
        return rank_memory(sizes, dims, NEEDS, stage).bytes["activations"]

    plain = ParallelDims(pipeline=4)
    assert [activations(plain, stage) / activations(plain, 3) for stage in range(4)] == [4, 3, 2, 1]
    assert activations(replace(plain, virtual_pipeline=2), 0) / activations(plain, 0) == pytest.approx(11 / 8)


def test_uneven_stages_hold_the_layers_that_the_split_says_and_nothing_twice():
    sizes = sizes_of(DEEPSEEK_V3)
    stages = [rank_parameters(sizes, ParallelDims(pipeline=4), stage) for stage in range(4)]
    whole = rank_parameters(sizes, ParallelDims(), 0)
    assert {name: sum(stage[name] for stage in stages) for name in whole} == whole
    per_layer = whole["attention"] // 61
    assert [stage["attention"] // per_layer for stage in stages] == [15, 15, 16, 15]
    assert [stage["dense MLP"] > 0 for stage in stages] == [True, False, False, False]


def test_the_heaviest_stage_is_reported_and_the_last_one_scores():
    sizes = sizes_of(QWEN3_30B)
    needs = replace(NEEDS, microbatch_tokens=32768, recompute="full")
    dims = ParallelDims(pipeline=2)
    # The first stage keeps more microbatches, the last one scores; which weighs more depends on their length.
    assert heaviest_rank(sizes, dims, needs).stage == 0
    assert heaviest_rank(sizes, dims, replace(needs, microbatch_tokens=1024, overlap=True)).stage == 1
    assert rank_memory(sizes, dims, needs, 0).bytes["scoring"] == 0
    hidden, head, slab = 32768 * 2048 * (2 + 4), 2048 * 151936 * 2, 32768 * 2048 * 4
    assert rank_memory(sizes, dims, needs, 1).bytes["scoring"] == hidden + 3 * slab
    overlapping = replace(needs, overlap=True)
    assert rank_memory(sizes, dims, overlapping, 1).bytes["scoring"] == hidden + head + 3 * slab


def test_the_embeddings_gradient_counts_if_it_is_more_than_the_pass_has_freed():
    sizes, matrix = sizes_of(QWEN3_30B), 2048 * 151936 * 2
    few = replace(NEEDS, microbatch_tokens=512, recompute="full")

    def alone(sizes: ModelDescription, dims: ParallelDims, needs: Needs, stage: int = 0) -> tuple[int, int]:
        purposes = rank_memory(sizes, dims, needs, stage).bytes
        return purposes["embedding's gradient"], purposes["activations"] + purposes["scoring"]

    added, freed = alone(sizes, ParallelDims(), few)
    assert added == matrix - freed > 0
    assert alone(sizes, ParallelDims(), replace(few, microbatch_tokens=16384))[0] == 0
    assert alone(sizes, ParallelDims(), replace(few, overlap=True))[0] == 0, "that of the head is gone by then"
    tied = replace(sizes, tie_word_embeddings=True)
    assert alone(tied, ParallelDims(), replace(few, overlap=True))[0] == added, "that of a tied head is not"
    # The first of two stages has two microbatches at once, and frees one; the second has no embedding.
    added, kept = alone(sizes, ParallelDims(pipeline=2), few)
    assert added == matrix - kept // 2
    assert alone(sizes, ParallelDims(pipeline=2), few, stage=1)[0] == 0


def test_each_purpose_has_its_places_in_a_colocated_run():
    purposes = {f"rank: {name}" for name in rank_memory(sizes_of(QWEN3_30B), ParallelDims(), NEEDS, 0).bytes}
    assert purposes == {what for what in ASLEEP | ALWAYS if what.startswith("rank: ")}


def test_slabs_are_as_wide_as_the_kernels_make_them():
    for num_rows, width in ((1, 64), (512, 2048), (1501, 2048), (8192, 2048), (32768, 7168)):
        assert slab_columns(num_rows, width) == products.slab_columns(num_rows, width)


def test_needs_are_read_from_the_configuration():
    changes = ["model.dtype=bfloat16", "trainer.recompute=full", "trainer.distributed_optimizer=overlap"]
    config = load_config([*changes, "algorithm.kl_coef=0.1", "trainer.microbatch_tokens=4096"], command="train")
    assert config.rank_needs() == Needs(4096, 2, "full", distributed_optimizer=True, reference=True, overlap=True)
    offloaded = load_config([*changes, "trainer.optimizer_offload=0.5"], command="train")
    assert offloaded.rank_needs().offload == 0.5
    assert load_config([], command="train").rank_needs() == Needs(
        8192, 4, "none", distributed_optimizer=False, reference=False
    )


# --- the numbers in docs/trainer.md ----------------------------------------------------------------------------------

PUBLISHED = {
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-235B-A22B": QWEN3_235B,
    "DeepSeek-V3": DEEPSEEK_V3,
    "GLM-4.5": GLM_45,
    "GLM-4.5-Air": GLM_45_AIR,
}
DOCS_NEEDS = Needs(16384, 2, "full", distributed_optimizer=True, reference=False, overlap=True)
SHORT = {"TP": "tensor", "PP": "pipeline", "CP": "context", "EP": "expert", "DP": "data"}


def shape_of(text: str) -> ParallelDims:
    return ParallelDims(**{SHORT[name]: int(size) for name, size in re.findall(r"([A-Z]+)(\d+)", text)})


def table_rows(header: str) -> list[list[str]]:
    text = (Path(__file__).parents[3] / "docs" / "trainer.md").read_text(encoding="utf-8")
    lines = text.partition(f"{header}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_layout_in_the_docs_is_valid_and_needs_what_it_says():
    checked = 0
    for model, devices, *cells in table_rows("| model | devices | 80 GB | 141 GB |"):
        sizes = sizes_of(PUBLISHED[model])
        for cell, device_gib in zip(cells, (80, 139), strict=True):
            if cell == "-":
                continue
            dims, gib = shape_of(cell), float(cell.partition(": ")[2])
            assert layout_problems(dims, sizes) == []
            assert dims.world_size == int(devices)
            rank = heaviest_rank(sizes, dims, DOCS_NEEDS)
            assert round(rank.total_bytes / 2**30, 1) == gib
            assert rank.total_bytes <= USABLE_SHARE * device_gib * 2**30
            checked += 1
    assert checked > 30


def test_recompute_in_the_docs_needs_what_it_says():
    rows = table_rows("| layout | rows per microbatch | none | selective | full |")
    for layout, tokens, *cells in rows:
        for cell, recompute in zip(cells, ("none", "selective", "full"), strict=True):
            needs = replace(DOCS_NEEDS, microbatch_tokens=int(tokens), recompute=recompute)
            rank = heaviest_rank(sizes_of(QWEN3_30B), shape_of(layout), needs)
            assert f"{rank.total_bytes / 2**30:.1f}" == cell
    assert len(rows) == 4
